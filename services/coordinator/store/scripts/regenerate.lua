-- Deletes groups that cannot be trained any more; their prompts wait to be issued again.
-- KEYS: base. ARGV: step, prompt ... Answers how many prompts wait.
local base, waiting = KEYS[1], 0
for i = 2, #ARGV do
  if redis.call('HGET', base .. ':state', ARGV[i]) == 'generated' and wait(base, ARGV[i], 'regenerate', ARGV[1]) then
    forget(base, ARGV[i])
    waiting = waiting + 1
  end
end
return waiting
