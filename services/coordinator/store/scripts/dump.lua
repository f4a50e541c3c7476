-- All keys of the coordinators at one moment. Answers key, milliseconds until it expires (-1: never), its value as DUMP
-- has it, ... A lease, and the members of the fleet, belong to the place that they were in.
local found, cursor = {}, '0'
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', 'millrace:*', 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do
    if key ~= 'millrace:leader' and key ~= 'millrace:probe' and key ~= 'millrace:fleet:members' then
      found[#found + 1] = key
      found[#found + 1] = redis.call('PTTL', key)
      found[#found + 1] = redis.call('DUMP', key)
    end
  end
until cursor == '0'
return found
