-- Answers a lease with its group.
-- KEYS: base, the job's deaths. ARGV: entry, fence, prompt, group, summary, seconds for which the answer is remembered.
-- Answers an outcome, as answer() in ledger.lua.
local base = KEYS[1]
local outcome, prompt = answer(base, ARGV[1], ARGV[2], ARGV[3], 'complete', ARGV[6])
if outcome ~= 'done' then return outcome end
redis.call('HSET', base .. ':groups', prompt, ARGV[4])
redis.call('HSET', base .. ':summaries', prompt, ARGV[5])
redis.call('ZADD', base .. ':generated', redis.call('HINCRBY', base .. ':notes', 'completions', 1), prompt)
redis.call('HSET', base .. ':notes', 'refused_in_a_row', 0)
redis.call('HDEL', base .. ':deaths', ARGV[3])
redis.call('DEL', KEYS[2])
return outcome
