-- Ends a ledger: drops what is in flight, and deletes what only a running job needs.
-- KEYS: base. ARGV: step, DropReason. Answers how many prompts were dropped.
local base, dropped = KEYS[1], 0

local function drop(prompt)
  if not move(base, prompt, 'drop') then return end
  settle(base, prompt, ARGV[1], ARGV[2])
  dropped = dropped + 1
end

for _, entry in ipairs(redis.call('XRANGE', base .. ':queue', '-', '+')) do drop(prompt_of(entry[2])) end
for _, prompt in ipairs(redis.call('ZRANGE', base .. ':generated', 0, -1)) do drop(prompt) end
for _, prompt in ipairs(redis.call('ZRANGE', base .. ':waiting', 0, -1)) do drop(prompt) end
redis.call('HSET', base .. ':counts', 'waiting', 0)
forget_all_parts(base)
for _, part in ipairs({'queue', 'fence', 'leased', 'groups', 'summaries', 'generated', 'waiting', 'notes', 'deaths'}) do
  redis.call('DEL', base .. ':' .. part)
end
return dropped
