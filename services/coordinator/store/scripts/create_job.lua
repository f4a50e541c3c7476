-- A new job, once per idempotency key. KEYS: job, jobs, idempotency key ('' for none).
-- ARGV: id, created_s, digest of the spec, seconds for which the key is kept, number of the event's fields, these
-- fields, then field, value ...
-- Answers {id, digest} of the job that has the key: this one or an earlier one.
if KEYS[3] ~= '' then
  local known = redis.call('HMGET', KEYS[3], 'job', 'digest')
  if known[1] then return known end
  redis.call('HSET', KEYS[3], 'job', ARGV[1], 'digest', ARGV[3])
  redis.call('EXPIRE', KEYS[3], ARGV[4])
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  local parts = tonumber(ARGV[5])
  redis.call('HSET', KEYS[1], unpack(ARGV, 6 + parts))
  redis.call('XADD', KEYS[1] .. ':events', '*', unpack(ARGV, 6, 5 + parts))
  redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
end
return {ARGV[1], ARGV[3]}
