-- Issues prompts again that wait for it. KEYS: base. ARGV: step, then drafts (each_draft). Answers how many were issued.
local base = KEYS[1]
return each_draft(2, function(prompt, reason, detail, first, last)
  if redis.call('ZREM', base .. ':waiting', prompt) == 0 then return false end
  redis.call('HINCRBY', base .. ':counts', 'waiting', -1)
  place(base, ARGV[1], prompt, reason, detail, first, last)
  return true
end)
