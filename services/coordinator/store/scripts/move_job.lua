-- Moves a job to another state, or changes the pending request to its loop (the field `wanted`).
-- KEYS: job; and its ledger if the state changes: at a start the ledger goes back to the job's step; of a job that
-- succeeded only the counts stay, as it is never resumed; that of a job that goes from its steps back to the queue ends.
-- ARGV: name of this call, value that `wanted` must have ('any' for any), number of states that the job may be in, these
-- states, number of the event's fields, these fields, then field, value ... to set.
-- Answers {moved, the state before, `wanted` before}; nothing if there is no such job. A pending cancellation is not
-- overwritten before the job has ended. The last call that moved the job may be repeated: its answer may have been lost.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return nil end
local wanted = redis.call('HGET', KEYS[1], 'wanted') or ''
if redis.call('HGET', KEYS[1], 'moved_by') == ARGV[1] then return {1, state, wanted} end
if ARGV[2] ~= 'any' and ARGV[2] ~= wanted then return {0, state, wanted} end

local allowed = tonumber(ARGV[3])
local parts = tonumber(ARGV[4 + allowed])
local first = 5 + allowed + parts
local over = state == 'failed' or state == 'cancelled'
for i = first, #ARGV, 2 do
  if ARGV[i] == 'wanted' and ARGV[i + 1] ~= 'cancel' and wanted == 'cancel' and not over then
    return {0, state, wanted}
  end
end
for i = 4, 3 + allowed do
  if ARGV[i] == state then
    redis.call('HSET', KEYS[1], 'moved_by', ARGV[1], unpack(ARGV, first))
    local base, now = KEYS[2], redis.call('HMGET', KEYS[1], 'state', 'step', 'id')
    if now[1] ~= state then index(now[3], state, now[1], unix_time()) end
    if base and now[1] == 'starting' then
      rewind(base, KEYS[1], tonumber(now[2]), {})
      redis.call('DEL', KEYS[1] .. ':deaths', KEYS[1] .. ':setbacks', KEYS[1] .. ':last_words')
    end
    if base and now[1] == 'queued' and state == 'running' then
      close(base, tonumber(now[2]) + 1, 'job_preempted', 1e9)
      redis.call('DEL', KEYS[1] .. ':batch')
    end
    if base and now[1] == 'succeeded' then redis.call('UNLINK', base .. ':state', base .. ':settled', base .. ':reason') end
    if parts > 0 then redis.call('XADD', KEYS[1] .. ':events', '*', unpack(ARGV, 5 + allowed, first - 1)) end
    return {1, state, wanted}
  end
end
return {0, state, wanted}
