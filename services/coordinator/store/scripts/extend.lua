-- Restarts the deadlines of leases, and keeps what they have got. KEYS: base.
-- ARGV: member, most bytes of parts that are kept for one lease, then entry, fence, parts ... Answers the entries that
-- are lost.
local base, member, most, lost = KEYS[1], ARGV[1], tonumber(ARGV[2]), {}
for i = 3, #ARGV, 3 do
  if redis.call('HGET', base .. ':fence', ARGV[i]) == ARGV[i + 1] then
    redis.call('XCLAIM', base .. ':queue', GROUP, member, 0, ARGV[i], 'JUSTID')
    keep_parts(base, ARGV[i], ARGV[i + 2], most)
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
