-- Functions of all scripts that move prompts. The store puts the table MOVES (services/coordinator/state/ledger.py) and
-- this file in front of each of them. `base` is the key prefix of one ledger: millrace:job:<job>:<purpose>.
local GROUP, NOBODY = 'replicas', 'nobody'

-- Moves one prompt and the counters. Answers the state it was in, or false if the move is not allowed from there.
local function move(base, prompt, name)
  local rule = MOVES[name]
  local state = redis.call('HGET', base .. ':state', prompt) or 'none'
  if not rule.before[state] then return false end
  redis.call('HSET', base .. ':state', prompt, rule.after)
  redis.call('HINCRBY', base .. ':counts', state == 'none' and 'issued' or state, state == 'none' and 1 or -1)
  redis.call('HINCRBY', base .. ':counts', rule.after, 1)
  return state
end

-- Adds a prompt to the queue. ARGV[first] to ARGV[last] are the fields of its row (QueuedPrompt.encode).
-- A ledger that is new, or was closed, has no queue yet.
local function enqueue(base, first, last)
  if redis.call('EXISTS', base .. ':queue') == 0 then
    redis.call('XGROUP', 'CREATE', base .. ':queue', GROUP, '0', 'MKSTREAM')
  end
  redis.call('XADD', base .. ':queue', '*', unpack(ARGV, first, last))
end

-- The prompt of a row in the queue.
local function prompt_of(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'prompt' then return fields[i + 1] end
  end
end

-- Ends a lease without an answer: its prompt goes back to the queue, and its fence is not valid any more.
local function give_back(base, entry)
  local prompt = redis.call('HGET', base .. ':leased', entry)
  redis.call('XCLAIM', base .. ':queue', GROUP, NOBODY, 0, entry, 'JUSTID')
  redis.call('HINCRBY', base .. ':fence', entry, 1)
  if prompt then move(base, prompt, 'give_back') end
  return prompt
end

-- What the holders of an entry have sampled so far: serialized LeaseParts, one after the other, which is one message
-- with all of them. The hash has their size. More than `most` bytes are not kept.
local function keep_parts(base, entry, parts, most)
  local size = tonumber(redis.call('HGET', base .. ':parts', entry) or '0') + #parts
  if #parts == 0 or size > most then return end
  redis.call('APPEND', base .. ':parts:' .. entry, parts)
  redis.call('HSET', base .. ':parts', entry, size)
end

local function forget_parts(base, entry)
  if redis.call('HDEL', base .. ':parts', entry) == 1 then redis.call('UNLINK', base .. ':parts:' .. entry) end
end

local function forget_all_parts(base)
  for _, entry in ipairs(redis.call('HKEYS', base .. ':parts')) do forget_parts(base, entry) end
end

-- Removes an entry from the queue for good.
local function dequeue(base, entry)
  forget_parts(base, entry)
  redis.call('XACK', base .. ':queue', GROUP, entry)
  redis.call('XDEL', base .. ':queue', entry)
  redis.call('HDEL', base .. ':fence', entry)
  redis.call('HDEL', base .. ':leased', entry)
end

-- Ends a lease with the move `name`: 'complete' or 'refuse'. `expected`: the prompt that the answer is for, nil if the
-- answer does not say it. The answer is remembered for `seconds`. Answers an outcome, and the prompt if it is 'done':
-- 'done'; 'again' if the same answer came before; 'fenced' if the lease is over; 'mismatch' for another prompt's answer.
local function answer(base, entry, fence, expected, name, seconds)
  local answered = base .. ':answered:' .. entry
  if redis.call('HGET', base .. ':fence', entry) ~= fence then
    return redis.call('GET', answered) == fence and 'again' or 'fenced'
  end
  local prompt = redis.call('HGET', base .. ':leased', entry)
  if expected and expected ~= prompt then return 'mismatch' end
  if not move(base, prompt, name) then return 'fenced' end
  dequeue(base, entry)
  redis.call('SET', answered, fence, 'EX', seconds)
  return 'done', prompt
end

-- Deletes a prompt's group, after it was trained or given up.
local function forget(base, prompt)
  redis.call('HDEL', base .. ':groups', prompt)
  redis.call('HDEL', base .. ':summaries', prompt)
  redis.call('ZREM', base .. ':generated', prompt)
end

-- A prompt that is to be generated again waits to be issued; the one with the lowest `order` is issued first.
local function wait(base, prompt, name, order)
  if not move(base, prompt, name) then return false end
  redis.call('ZADD', base .. ':waiting', order, prompt)
  redis.call('HINCRBY', base .. ':counts', 'waiting', 1)
  return true
end

-- Notes the step at which a prompt was trained or dropped, and the DropReason if it was dropped.
local function settle(base, prompt, step, reason)
  redis.call('ZADD', base .. ':settled', step, prompt)
  if reason then
    redis.call('HSET', base .. ':reason', prompt, reason)
    redis.call('HINCRBY', base .. ':reasons', reason, 1)
  end
end

-- A prompt for which there is no group, because of its data, its reward or its replica.
local function refuse(base, prompt, step, reason, detail)
  settle(base, prompt, step, reason)
  redis.call('HINCRBY', base .. ':notes', 'refused_in_a_row', 1)
  redis.call('HSET', base .. ':notes', 'last_refusal_reason', reason, 'last_refusal_detail', detail)
  if reason == 'reward_failed' or reason == 'environment_failed' then
    redis.call('HSET', base .. ':notes', 'last_failure', detail)
  end
end

-- Reads the drafts at the end of ARGV, from index `i` on. Each is: prompt, DropReason ('' if it is not dropped), detail,
-- number of fields of its row, these fields. Calls use(prompt, reason, detail, first, last) with the indices of the
-- fields. Answers the number of drafts for which `use` answered true.
local function each_draft(i, use)
  local used = 0
  while i <= #ARGV do
    local last = i + 3 + tonumber(ARGV[i + 3])
    if use(ARGV[i], ARGV[i + 1], ARGV[i + 2], i + 4, last) then used = used + 1 end
    i = last + 1
  end
  return used
end

-- Puts an issued prompt into the queue, or drops it at once if its row of the data cannot be used.
local function place(base, step, prompt, reason, detail, first, last)
  if reason == '' then
    enqueue(base, first, last)
  else
    move(base, prompt, 'drop')
    refuse(base, prompt, step, reason, detail)
  end
end

-- Takes the job back to step `to`. Weights of later versions are not valid any more, nor is what they sampled: of the
-- complete groups those of the prompts in `kept`, a set, stay; the prompts of the others wait to be issued again. Leases
-- end. What was settled since may be the whole pass: undo.lua does that part, and until then a note says how far.
-- Answers how many complete groups stay, and how many do not.
local function rewind(base, job, to, kept)
  local queue, step = base .. ':queue', tonumber(redis.call('HGET', job, 'step'))
  local stay, go = 0, 0

  for _, prompt in ipairs(redis.call('ZRANGE', base .. ':generated', 0, -1)) do
    if kept[prompt] then
      stay = stay + 1
    else
      forget(base, prompt)
      wait(base, prompt, 'rewind', step + 1)
      go = go + 1
    end
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
  for gone = to + 1, step do
    redis.call('HDEL', job .. ':metrics', gone)
    redis.call('HDEL', job .. ':histograms', gone)
  end
  for _, point in ipairs(redis.call('HKEYS', job .. ':series')) do
    if tonumber(string.match(point, ':(%d+)$')) >= to then redis.call('HDEL', job .. ':series', point) end
  end
  redis.call('HSET', base .. ':notes', 'refused_in_a_row', 0, 'undoing_after', to)
  redis.call('DEL', base .. ':deaths')
  forget_all_parts(base)
  redis.call('HSET', job, 'step', to, 'version', to)
  redis.call('HINCRBY', job, 'lineage', 1)
  redis.call('DEL', job .. ':batch')
  return stay, go
end

-- Drops at most `most` prompts of what is in flight for `reason`, as settled at `step`. An answer may come between two
-- calls and moves a prompt from the queue to the complete groups, so the queue is emptied first.
-- Answers how many prompts were dropped, and 1 if nothing is in flight any more, otherwise 0.
local function drop_some(base, step, reason, most)
  local dropped, left = 0, most

  local function drop(prompt)
    left = left - 1
    if not move(base, prompt, 'drop') then return end
    settle(base, prompt, step, reason)
    dropped = dropped + 1
  end

  for _, entry in ipairs(redis.call('XRANGE', base .. ':queue', '-', '+', 'COUNT', left)) do
    drop(prompt_of(entry[2]))
    dequeue(base, entry[1])
  end
  if left <= 0 then return dropped, 0 end
  for _, prompt in ipairs(redis.call('ZRANGE', base .. ':generated', 0, left - 1)) do
    drop(prompt)
    forget(base, prompt)
  end
  if left <= 0 then return dropped, 0 end
  for _, prompt in ipairs(redis.call('ZRANGE', base .. ':waiting', 0, left - 1)) do
    drop(prompt)
    redis.call('ZREM', base .. ':waiting', prompt)
    redis.call('HINCRBY', base .. ':counts', 'waiting', -1)
  end
  return dropped, left > 0 and 1 or 0
end

-- Ends a ledger, or drops a part of it: see drop_some. With the last prompt goes what only a running job needs.
local function close(base, step, reason, most)
  local dropped, ended = drop_some(base, step, reason, most)
  if ended == 0 then return {dropped, ended} end
  redis.call('HSET', base .. ':counts', 'waiting', 0)
  forget_all_parts(base)
  for _, part in ipairs({'queue', 'fence', 'leased', 'groups', 'summaries', 'generated', 'waiting', 'notes', 'deaths'}) do
    redis.call('DEL', base .. ':' .. part)
  end
  return {dropped, ended}
end
