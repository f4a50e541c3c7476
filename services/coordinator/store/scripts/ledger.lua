-- Prepended to every script that moves prompts, after MOVES. `base` names one ledger: <job>:train or <job>:evaluation.
local GROUP, NOBODY = 'replicas', 'nobody'

-- Moves one prompt and its counters. Answers where it stood, or false where the move is not allowed from there.
local function move(base, prompt, name)
  local rule = MOVES[name]
  local state = redis.call('HGET', base .. ':state', prompt) or 'none'
  if not rule.before[state] then return false end
  redis.call('HSET', base .. ':state', prompt, rule.after)
  redis.call('HINCRBY', base .. ':counts', state == 'none' and 'issued' or state, state == 'none' and 1 or -1)
  redis.call('HINCRBY', base .. ':counts', rule.after, 1)
  return state
end

-- A ledger that is new, or was closed, has no queue yet.
local function enqueue(base, prompt, payload)
  if redis.call('EXISTS', base .. ':queue') == 0 then
    redis.call('XGROUP', 'CREATE', base .. ':queue', GROUP, '0', 'MKSTREAM')
  end
  redis.call('XADD', base .. ':queue', '*', 'prompt', prompt, 'lease', payload)
end

-- Ends a lease without an answer: nobody holds the entry, and its old fence is worth nothing.
local function give_back(base, entry)
  local prompt = redis.call('HGET', base .. ':leased', entry)
  redis.call('XCLAIM', base .. ':queue', GROUP, NOBODY, 0, entry, 'JUSTID')
  redis.call('HINCRBY', base .. ':fence', entry, 1)
  if prompt then move(base, prompt, 'give_back') end
  return prompt
end

-- Takes an entry out of the queue for good.
local function dequeue(base, entry)
  redis.call('XACK', base .. ':queue', GROUP, entry)
  redis.call('XDEL', base .. ':queue', entry)
  redis.call('HDEL', base .. ':fence', entry)
  redis.call('HDEL', base .. ':leased', entry)
end

-- Forgets a prompt's group, after it was trained or given up.
local function forget(base, prompt)
  redis.call('HDEL', base .. ':groups', prompt)
  redis.call('HDEL', base .. ':summaries', prompt)
  redis.call('ZREM', base .. ':generated', prompt)
end

-- A prompt that is to be generated again waits to be issued; the lowest `order` goes first.
local function wait(base, prompt, name, order)
  if not move(base, prompt, name) then return false end
  redis.call('ZADD', base .. ':waiting', order, prompt)
  redis.call('HINCRBY', base .. ':counts', 'waiting', 1)
  return true
end

-- Notes at which step a prompt was trained or dropped, and why it was dropped: what stands before the first colon.
local function settle(base, prompt, step, reason)
  redis.call('ZADD', base .. ':settled', step, prompt)
  if reason then
    local head = string.sub(string.match(reason, '^[^:]*'), 1, 80)
    redis.call('HSET', base .. ':reason', prompt, head)
    redis.call('HINCRBY', base .. ':reasons', head, 1)
  end
end

-- A prompt that brought no group through no doing of the coordinator's.
local function refuse(base, prompt, step, reason)
  settle(base, prompt, step, reason)
  redis.call('HINCRBY', base .. ':notes', 'refused_in_a_row', 1)
  redis.call('HSET', base .. ':notes', 'last_refusal', reason)
end

-- Lets the job go back to step `to`: weights from before mean nothing, and what was in flight waits to be issued again.
-- What was settled since, which may be the whole pass, undo.lua does: until then it is noted that it has to be done.
local function rewind(base, job, to)
  local queue, step = base .. ':queue', tonumber(redis.call('HGET', job, 'step'))

  for _, prompt in ipairs(redis.call('ZRANGE', base .. ':generated', 0, -1)) do
    forget(base, prompt)
    wait(base, prompt, 'rewind', step + 1)
  end
  if redis.call('EXISTS', queue) == 1 then
    local start = '-'
    repeat
      local held = redis.call('XPENDING', queue, GROUP, start, '+', 100)
      for _, pending in ipairs(held) do
        if pending[2] ~= NOBODY then give_back(base, pending[1]) end
        start = '(' .. pending[1]
      end
    until #held == 0
  end
  for gone = to + 1, step do redis.call('HDEL', job .. ':metrics', gone) end
  redis.call('HSET', base .. ':notes', 'refused_in_a_row', 0, 'undoing_after', to)
  redis.call('HSET', job, 'step', to, 'version', to)
  redis.call('HINCRBY', job, 'lineage', 1)
  redis.call('DEL', job .. ':batch')
end
