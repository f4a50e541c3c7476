-- Continues a rewind: of the prompts that were settled after the step that it goes back to, up to `count` wait to be
-- issued again. KEYS: base. ARGV: count. Answers 1, also if that was the last part; 0 if no rewind is in progress.
local base, count = KEYS[1], tonumber(ARGV[1])
local to = redis.call('HGET', base .. ':notes', 'undoing_after')
if not to then return 0 end
local prompts = redis.call('ZRANGEBYSCORE', base .. ':settled', '(' .. to, '+inf', 'WITHSCORES', 'LIMIT', 0, count)
for i = 1, #prompts, 2 do
  local prompt, step = prompts[i], prompts[i + 1]
  local reason = redis.call('HGET', base .. ':reason', prompt)
  if reason then
    redis.call('HDEL', base .. ':reason', prompt)
    redis.call('HINCRBY', base .. ':reasons', reason, -1)
  end
  wait(base, prompt, 'rewind', step)
  redis.call('ZREM', base .. ':settled', prompt)
end
if #prompts == 0 then redis.call('HDEL', base .. ':notes', 'undoing_after') end
return 1
