-- Throws groups away that can no longer be trained; their prompts wait to be issued again.
-- KEYS: base. ARGV: step, prompt ... Answers how many.
local base, waiting = KEYS[1], 0
for i = 2, #ARGV do
  if redis.call('HGET', base .. ':state', ARGV[i]) == 'generated' and move(base, ARGV[i], 'regenerate') then
    forget(base, ARGV[i])
    redis.call('ZADD', base .. ':waiting', ARGV[1], ARGV[i])
    redis.call('HINCRBY', base .. ':counts', 'waiting', 1)
    waiting = waiting + 1
  end
end
return waiting
