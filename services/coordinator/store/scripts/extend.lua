-- Restarts the deadlines of leases. KEYS: base. ARGV: member, then entry, fence ... Answers the entries that are lost.
local base, member, lost = KEYS[1], ARGV[1], {}
for i = 2, #ARGV, 2 do
  if redis.call('HGET', base .. ':fence', ARGV[i]) == ARGV[i + 1] then
    redis.call('XCLAIM', base .. ':queue', GROUP, member, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
