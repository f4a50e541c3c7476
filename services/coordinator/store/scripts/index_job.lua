-- Adds a job to the index that an earlier release, which had no index, has stored.
-- KEYS: job. ARGV: id, output folder. Answers 1; 0 if there is no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
redis.call('HSET', KEYS[1], 'folder', ARGV[2])
redis.call('ZADD', OUTPUT .. ARGV[2], redis.call('ZSCORE', JOBS, ARGV[1]), ARGV[1])
index(ARGV[1], '', state, redis.call('HGET', KEYS[1], 'finished_s') or unix_time())
return 1
