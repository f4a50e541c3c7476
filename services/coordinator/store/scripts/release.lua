-- Ends leases unanswered, and keeps what they have got. KEYS: base.
-- ARGV: most bytes of parts that are kept for one lease, then entry, fence, parts ... Answers the prompts that are queued
-- again.
local base, most, prompts = KEYS[1], tonumber(ARGV[1]), {}
for i = 2, #ARGV, 3 do
  if redis.call('HGET', base .. ':fence', ARGV[i]) == ARGV[i + 1] then
    keep_parts(base, ARGV[i], ARGV[i + 2], most)
    prompts[#prompts + 1] = give_back(base, ARGV[i])
  end
end
return prompts
