-- Deletes a job that has ended, and everything stored for it. KEYS: the job, then the other keys that it may own.
-- ARGV: id. Answers 1; 0 if there is no such job, or it was resumed.
local id = ARGV[1]
if not redis.call('ZSCORE', FINISHED, id) then return 0 end
local fields = redis.call('HMGET', KEYS[1], 'state', 'folder')
if fields[1] then redis.call('ZREM', JOBS .. ':' .. fields[1], id) end
if fields[2] then redis.call('ZREM', OUTPUT .. fields[2], id) end
redis.call('ZREM', JOBS, id)
redis.call('ZREM', FINISHED, id)
for _, key in ipairs(KEYS) do redis.call('UNLINK', key) end
return 1
