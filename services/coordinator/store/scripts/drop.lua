-- Drops generated prompts. KEYS: base. ARGV: step, DropReason, prompt ... Answers how many were dropped.
local base, dropped = KEYS[1], 0
for i = 3, #ARGV do
  if redis.call('HGET', base .. ':state', ARGV[i]) == 'generated' and move(base, ARGV[i], 'drop') then
    settle(base, ARGV[i], ARGV[1], ARGV[2])
    forget(base, ARGV[i])
    dropped = dropped + 1
  end
end
return dropped
