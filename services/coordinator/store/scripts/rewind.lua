-- The trainer went back to version `to`: everything after it is to be generated again.
-- KEYS: base, job. ARGV: to. Answers how many prompts wait to be issued again.
local base, job, to = KEYS[1], KEYS[2], tonumber(ARGV[1])
local queue, step = base .. ':queue', tonumber(redis.call('HGET', job, 'step'))

for _, prompt in ipairs(redis.call('ZRANGEBYSCORE', base .. ':settled', '(' .. to, '+inf')) do
  local reason = redis.call('HGET', base .. ':reason', prompt)
  if reason then
    redis.call('HDEL', base .. ':reason', prompt)
    redis.call('HINCRBY', base .. ':reasons', reason, -1)
  end
  wait(base, prompt, 'rewind', redis.call('ZSCORE', base .. ':settled', prompt))
  redis.call('ZREM', base .. ':settled', prompt)
end
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
redis.call('HSET', base .. ':notes', 'refused_in_a_row', 0)
redis.call('HSET', job, 'step', to, 'version', to)
redis.call('HINCRBY', job, 'lineage', 1)
redis.call('DEL', job .. ':batch')
return redis.call('ZCARD', base .. ':waiting')
