-- Ends all leases of a member. KEYS: base. ARGV: member. Answers the prompts that are queued again.
local base, member = KEYS[1], ARGV[1]
local queue, prompts = base .. ':queue', {}
if redis.call('EXISTS', queue) == 0 then return prompts end
repeat
  local held = redis.call('XPENDING', queue, GROUP, '-', '+', 100, member)
  for _, pending in ipairs(held) do prompts[#prompts + 1] = give_back(base, pending[1]) end
until #held == 0
redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, member)
return prompts
