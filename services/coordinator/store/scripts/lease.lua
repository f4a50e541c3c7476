-- Claims up to `count` prompts for a member: first those that other members lost, then new ones.
-- None if the job has another lineage by now: the member's weights are not valid then.
-- A prompt with which several members died is leased alone: if another one dies, it was this prompt.
-- KEYS: base, job, the bases of all ledgers of the job. ARGV: member, count, lineage, bytes of prompts and their parts after
-- which no more are claimed, the share of the queued prompts that the member may have.
-- Answers {entry, fence, fields of the prompt's row, parts of earlier holders} for each; 'held back' while the member has such a prompt.
local base, member, count = KEYS[1], ARGV[1], tonumber(ARGV[2])
local queue, leases, bytes = base .. ':queue', {}, 0
if redis.call('HGET', KEYS[2], 'lineage') ~= ARGV[3] then return leases end
if count < 1 or redis.call('EXISTS', queue) == 0 then return leases end

local function is_suspect(of, entry)
  local prompt = redis.call('HGET', of .. ':leased', entry)
  return prompt and tonumber(redis.call('HGET', of .. ':deaths', prompt) or '0') >= SUSPECT_AFTER
end

local function holds_suspect()
  for i = 3, #KEYS do
    if redis.call('EXISTS', KEYS[i] .. ':deaths', KEYS[i] .. ':queue') == 2 then
      for _, held in ipairs(redis.call('XPENDING', KEYS[i] .. ':queue', GROUP, '-', '+', 1000, member)) do
        if is_suspect(KEYS[i], held[1]) then return true end
      end
    end
  end
  return false
end

if holds_suspect() then return 'held back' end
local queued = tonumber(redis.call('HGET', base .. ':counts', 'queued') or '0') - redis.call('ZCARD', base .. ':waiting')
count = math.min(count, math.max(1, math.ceil(queued * tonumber(ARGV[5]) - 1e-9)))

local function claim(entry, fields)
  local prompt = prompt_of(fields)
  move(base, prompt, 'lease')
  local fence = redis.call('HINCRBY', base .. ':fence', entry, 1)
  redis.call('HSET', base .. ':leased', entry, prompt)
  local parts = redis.call('HEXISTS', base .. ':parts', entry) == 1 and redis.call('GET', base .. ':parts:' .. entry) or ''
  bytes = bytes + #parts
  for _, field in ipairs(fields) do bytes = bytes + #field end
  leases[#leases + 1] = {entry, fence, fields, parts}
end

for _, pending in ipairs(redis.call('XPENDING', queue, GROUP, '-', '+', count, NOBODY)) do
  local suspect = is_suspect(base, pending[1])
  if (suspect and #leases > 0) or bytes > tonumber(ARGV[4]) then return leases end
  local entry = redis.call('XCLAIM', queue, GROUP, member, 0, pending[1])[1]
  if entry then claim(entry[1], entry[2]) end
  if suspect then return leases end
end
while #leases < count and bytes <= tonumber(ARGV[4]) do
  local some = math.min(count - #leases, 4)
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, member, 'COUNT', some, 'STREAMS', queue, '>')
  if not fresh then break end
  for _, entry in ipairs(fresh[1][2]) do claim(entry[1], entry[2]) end
end
return leases
