-- KEYS: job. ARGV: number of states that it may be in, these states, number of the event's parts, these parts, then
-- field, value ... to set. Answers {moved, the state it was in}; nothing where there is no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return nil end
local allowed = tonumber(ARGV[1])
for i = 2, 1 + allowed do
  if ARGV[i] == state then
    local parts = tonumber(ARGV[2 + allowed])
    redis.call('HSET', KEYS[1], unpack(ARGV, 3 + allowed + parts))
    if parts > 0 then
      redis.call('XADD', KEYS[1] .. ':events', '*', unpack(ARGV, 3 + allowed, 2 + allowed + parts))
    end
    return {1, state}
  end
end
return {0, state}
