-- Answers a lease. KEYS: base. ARGV: entry, fence, prompt ('' where not told), move (complete or refuse), step,
-- group bytes or nothing, summary or reason, seconds for which the answer is remembered.
-- Answers done, again (the same answer came before), fenced, or mismatch (the group is of another prompt).
local base, entry, fence = KEYS[1], ARGV[1], ARGV[2]
local answered, notes = base .. ':answered:' .. entry, base .. ':notes'
if redis.call('HGET', base .. ':fence', entry) ~= fence then
  return redis.call('GET', answered) == fence and 'again' or 'fenced'
end
local prompt = redis.call('HGET', base .. ':leased', entry)
if ARGV[3] ~= '' and ARGV[3] ~= prompt then return 'mismatch' end
if not move(base, prompt, ARGV[4]) then return 'fenced' end
dequeue(base, entry)
redis.call('SET', answered, fence, 'EX', ARGV[8])
if ARGV[4] == 'complete' then
  redis.call('HSET', base .. ':groups', prompt, ARGV[6])
  redis.call('HSET', base .. ':summaries', prompt, ARGV[7])
  redis.call('ZADD', base .. ':generated', redis.call('HINCRBY', notes, 'completions', 1), prompt)
  redis.call('HSET', notes, 'refused_in_a_row', 0)
else
  refuse(base, prompt, ARGV[5], ARGV[7])
end
return 'done'
