-- Ends leases unanswered. KEYS: base. ARGV: entry, fence ... Answers the prompts that are queued again.
local base, prompts = KEYS[1], {}
for i = 1, #ARGV, 2 do
  if redis.call('HGET', base .. ':fence', ARGV[i]) == ARGV[i + 1] then
    prompts[#prompts + 1] = give_back(base, ARGV[i])
  end
end
return prompts
