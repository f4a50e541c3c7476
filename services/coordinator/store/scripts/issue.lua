-- New prompts into the queue. KEYS: base, job. ARGV: cursor expected ('' for none), cursor after, step, then
-- prompt, payload, reason ... A prompt with a reason is dropped as soon as it is issued: its row cannot be used.
-- Answers how many were issued; -1 where the cursor has moved on, so that a repeated call issues nothing twice.
local base, job = KEYS[1], KEYS[2]
if ARGV[1] ~= '' then
  if (redis.call('HGET', job, 'cursor') or '0') ~= ARGV[1] then return -1 end
  redis.call('HSET', job, 'cursor', ARGV[2])
end
local issued = 0
for i = 4, #ARGV, 3 do
  local prompt, payload, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if move(base, prompt, 'issue') then
    if reason == '' then
      enqueue(base, prompt, payload)
    else
      move(base, prompt, 'drop')
      refuse(base, prompt, ARGV[3], reason)
    end
    issued = issued + 1
  end
end
return issued
