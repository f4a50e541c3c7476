-- Charges a death to a job, once for each token. KEYS: the job's deaths. ARGV: place, token.
-- Answers the deaths of the place with no completed group in between.
local place, token = ARGV[1], 'token:' .. ARGV[1]
if redis.call('HGET', KEYS[1], token) ~= ARGV[2] then
  redis.call('HSET', KEYS[1], token, ARGV[2])
  redis.call('HINCRBY', KEYS[1], place, 1)
  redis.call('EXPIRE', KEYS[1], DEATHS_COUNT_S)
end
return tonumber(redis.call('HGET', KEYS[1], place))
