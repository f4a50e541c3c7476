-- Prompts that wait into the queue again. KEYS: base. ARGV: step, then prompt, payload, reason ... as for issue.
local base, issued = KEYS[1], 0
for i = 2, #ARGV, 3 do
  local prompt, payload, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('ZREM', base .. ':waiting', prompt) == 1 then
    redis.call('HINCRBY', base .. ':counts', 'waiting', -1)
    if reason == '' then
      enqueue(base, prompt, payload)
    else
      move(base, prompt, 'drop')
      refuse(base, prompt, ARGV[1], reason)
    end
    issued = issued + 1
  end
end
return issued
