-- Marks a step as trained: its prompts, the job's step and version, its metrics and samples, all at once.
-- KEYS: base, job. ARGV: step, reward, metrics row, histograms, number of steps whose histograms are kept, number of
-- samples, most samples kept, samples ..., prompts ... Answers 1; 0 if the step was marked before.
-- The step settles the deaths of places, and what those said that died before it.
local base, job, step = KEYS[1], KEYS[2], tonumber(ARGV[1])
if tonumber(redis.call('HGET', job, 'step')) ~= step - 1 then return 0 end
local first = 8 + tonumber(ARGV[6])
for i = first, #ARGV do
  if redis.call('HGET', base .. ':state', ARGV[i]) ~= 'generated' then
    return redis.error_reply('prompt ' .. ARGV[i] .. ' of step ' .. step .. ' is not generated')
  end
end
for i = first, #ARGV do
  move(base, ARGV[i], 'train')
  settle(base, ARGV[i], step)
  forget(base, ARGV[i])
end
for i = 8, first - 1 do redis.call('RPUSH', job .. ':samples', ARGV[i]) end
redis.call('LTRIM', job .. ':samples', -tonumber(ARGV[7]), -1)
redis.call('HSET', job .. ':metrics', step, ARGV[3])
redis.call('HSET', job .. ':histograms', step, ARGV[4])
redis.call('HDEL', job .. ':histograms', step - tonumber(ARGV[5]))
redis.call('HSET', job, 'step', step, 'version', step, 'reward', ARGV[2])
redis.call('DEL', job .. ':batch', job .. ':deaths', job .. ':last_words')
return 1
