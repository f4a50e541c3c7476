-- Claims up to `count` prompts for a member: first those that other members lost, then new ones.
-- None if the job has another lineage by now: the member's weights are not valid then.
-- KEYS: base, job. ARGV: member, count, lineage. Answers {entry, fence, fields of the prompt's row} for each.
local base, member, count = KEYS[1], ARGV[1], tonumber(ARGV[2])
local queue, leases = base .. ':queue', {}
if redis.call('HGET', KEYS[2], 'lineage') ~= ARGV[3] then return leases end
if count < 1 or redis.call('EXISTS', queue) == 0 then return leases end

local function claim(entry, fields)
  local prompt = prompt_of(fields)
  move(base, prompt, 'lease')
  local fence = redis.call('HINCRBY', base .. ':fence', entry, 1)
  redis.call('HSET', base .. ':leased', entry, prompt)
  leases[#leases + 1] = {entry, fence, fields}
end

for _, pending in ipairs(redis.call('XPENDING', queue, GROUP, '-', '+', count, NOBODY)) do
  local entry = redis.call('XCLAIM', queue, GROUP, member, 0, pending[1])[1]
  if entry then claim(entry[1], entry[2]) end
end
if #leases < count then
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, member, 'COUNT', count - #leases, 'STREAMS', queue, '>')
  if fresh then
    for _, entry in ipairs(fresh[1][2]) do claim(entry[1], entry[2]) end
  end
end
return leases
