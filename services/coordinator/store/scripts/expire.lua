-- Ends the leases that were not extended in time. KEYS: base. ARGV: lease_ms, Unix time until which the caller waits.
-- Answers the prompts that are queued again. After that time nothing is done: a Redis that was stopped for a while runs
-- this command first, before any replica could extend its leases.
local base, lease_ms, now = KEYS[1], ARGV[1], redis.call('TIME')
if now[1] + now[2] / 1e6 > tonumber(ARGV[2]) then return {} end
local queue, prompts, cursor = base .. ':queue', {}, '0-0'
if redis.call('EXISTS', queue) == 0 then return prompts end
repeat
  local found = redis.call('XAUTOCLAIM', queue, GROUP, NOBODY, lease_ms, cursor, 'COUNT', 100, 'JUSTID')
  cursor = found[1]
  for _, entry in ipairs(found[2]) do
    -- Entries of the consumer NOBODY are claimed too. Their prompts are queued, not leased.
    local prompt = redis.call('HGET', base .. ':leased', entry)
    if prompt and redis.call('HGET', base .. ':state', prompt) == 'leased' then
      prompts[#prompts + 1] = give_back(base, entry)
    end
  end
until cursor == '0-0'
return prompts
