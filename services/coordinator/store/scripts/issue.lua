-- Issues new prompts. KEYS: base, job. ARGV: cursor expected ('' for none), cursor after, step, then drafts (each_draft).
-- Answers how many were issued; -1 if the cursor has moved on, so that a repeated call issues nothing twice.
local base, job = KEYS[1], KEYS[2]
if ARGV[1] ~= '' then
  if (redis.call('HGET', job, 'cursor') or '0') ~= ARGV[1] then return -1 end
  redis.call('HSET', job, 'cursor', ARGV[2])
end
return each_draft(4, function(prompt, reason, detail, first, last)
  if not move(base, prompt, 'issue') then return false end
  place(base, ARGV[3], prompt, reason, detail, first, last)
  return true
end)
