-- Ends all leases of a member. KEYS: base.
-- ARGV: member; how it died ('' if it did not), step. A prompt that one member too many died with is dropped.
-- Answers the prompts that are queued again, and those that are dropped.
local base, member, died, step = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local queue, queued, dropped = base .. ':queue', {}, {}
if redis.call('EXISTS', queue) == 0 then return {queued, dropped} end

local function is_spent(prompt)
  if died == '' then return false end
  local deaths = redis.call('HINCRBY', base .. ':deaths', prompt, 1)
  redis.call('EXPIRE', base .. ':deaths', DEATHS_COUNT_S)
  return deaths >= PROMPT_BUDGET
end

repeat
  local held = redis.call('XPENDING', queue, GROUP, '-', '+', 100, member)
  for _, pending in ipairs(held) do
    local prompt = give_back(base, pending[1])
    if prompt and is_spent(prompt) and move(base, prompt, 'drop') then
      dequeue(base, pending[1])
      redis.call('HDEL', base .. ':deaths', prompt)
      refuse(base, prompt, step, 'killed_replicas', died)
      dropped[#dropped + 1] = prompt
    else
      queued[#queued + 1] = prompt
    end
  end
until #held == 0
redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, member)
return {queued, dropped}
