-- Whether a member holds a lease. KEYS: base. ARGV: member. Answers 1 or 0.
local queue = KEYS[1] .. ':queue'
if redis.call('EXISTS', queue) == 0 then return 0 end
return #redis.call('XPENDING', queue, GROUP, '-', '+', 1, ARGV[1])
