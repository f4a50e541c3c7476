-- Notes that the trainer was lost, once for each token. KEYS: the job's setbacks. ARGV: steps trained, token.
-- Answers how often that happened since the job first had trained so many steps.
local step = tonumber(ARGV[1])
local known = redis.call('HMGET', KEYS[1], 'step', 'token')
if step > tonumber(known[1] or '-1') then redis.call('HSET', KEYS[1], 'step', step, 'count', 0) end
if known[2] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'token', ARGV[2])
  redis.call('HINCRBY', KEYS[1], 'count', 1)
  redis.call('EXPIRE', KEYS[1], DEATHS_COUNT_S)
end
return tonumber(redis.call('HGET', KEYS[1], 'count'))
