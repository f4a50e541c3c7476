-- KEYS: job. ARGV: the request's name, number of states that it may be in, these states, number of the event's parts,
-- these parts, then field, value ... to set. Answers {moved, the state it was in}; nothing where there is no such job.
-- The last request that moved the job may be repeated: its answer may have been lost.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return nil end
if redis.call('HGET', KEYS[1], 'moved_by') == ARGV[1] then return {1, state} end
local allowed = tonumber(ARGV[2])
for i = 3, 2 + allowed do
  if ARGV[i] == state then
    local parts = tonumber(ARGV[3 + allowed])
    redis.call('HSET', KEYS[1], 'moved_by', ARGV[1], unpack(ARGV, 4 + allowed + parts))
    if parts > 0 then
      redis.call('XADD', KEYS[1] .. ':events', '*', unpack(ARGV, 4 + allowed, 3 + allowed + parts))
    end
    return {1, state}
  end
end
return {0, state}
