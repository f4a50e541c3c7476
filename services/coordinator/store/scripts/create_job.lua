-- A new job, once per idempotency key. KEYS: job, idempotency key ('' for none).
-- ARGV: id, created_s, digest of the spec, seconds for which the key is kept, number of the event's fields, these
-- fields, then field, value ...
-- Answers {id, digest} of the job that has the key: this one or an earlier one that is still stored.
local job, id, created_s = KEYS[1], ARGV[1], ARGV[2]
if KEYS[2] ~= '' then
  local known = redis.call('HMGET', KEYS[2], 'job', 'digest')
  if known[1] and redis.call('ZSCORE', JOBS, known[1]) then return known end
  redis.call('HSET', KEYS[2], 'job', id, 'digest', ARGV[3])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
if redis.call('EXISTS', job) == 0 then
  local parts = tonumber(ARGV[5])
  redis.call('HSET', job, unpack(ARGV, 6 + parts))
  redis.call('XADD', job .. ':events', '*', unpack(ARGV, 6, 5 + parts))
  -- Pages of the list of jobs begin at a time of submission, so no two jobs may have the same.
  while redis.call('ZCOUNT', JOBS, created_s, created_s) > 0 do
    created_s = string.format('%.6f', tonumber(created_s) + 0.000001)
  end
  redis.call('ZADD', JOBS, created_s, id)
  local fields = redis.call('HMGET', job, 'state', 'folder')
  index(id, '', fields[1], created_s)
  if fields[2] then redis.call('ZADD', OUTPUT .. fields[2], created_s, id) end
end
return {id, ARGV[3]}
