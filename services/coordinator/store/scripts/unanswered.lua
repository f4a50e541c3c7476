-- The first entries of the queue, leased or not, in the order of issue. KEYS: base. ARGV: count.
local entries = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[1] .. ':queue', '-', '+', 'COUNT', ARGV[1])) do entries[i] = entry[1] end
return entries
