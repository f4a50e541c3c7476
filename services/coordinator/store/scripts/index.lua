-- The index of jobs, for the scripts that create, move and delete them. All are sorted sets of job ids.
local JOBS = 'millrace:jobs'         -- all jobs, by the time of their submission; millrace:jobs:<state> has those in one state
local FINISHED = 'millrace:finished' -- jobs that have ended, by the time of their end
local OUTPUT = 'millrace:output:'    -- and a folder: the jobs whose output it is, by the time of their submission
-- The output folders of the jobs that have not ended: each with a zero byte and the job's id, in lexical order, so that
-- the folders inside one folder are neighbours.
local WRITING = 'millrace:writing'

-- Moves a job in the index. `before`: its state until now, '' for a new job. `finished_s`: Unix time of its end.
local function index(id, before, state, finished_s)
  local created_s = redis.call('ZSCORE', JOBS, id)
  if not created_s then return end
  if before ~= '' then redis.call('ZREM', JOBS .. ':' .. before, id) end
  redis.call('ZADD', JOBS .. ':' .. state, created_s, id)
  if ENDED[state] then redis.call('ZADD', FINISHED, finished_s, id) else redis.call('ZREM', FINISHED, id) end
  local folder = redis.call('HGET', 'millrace:job:' .. id, 'folder')
  if not folder or folder == '' then return end
  if ENDED[state] then redis.call('ZREM', WRITING, folder .. '\0' .. id) else redis.call('ZADD', WRITING, 0, folder .. '\0' .. id) end
end

local function unix_time()
  local time = redis.call('TIME')
  return string.format('%d.%06d', time[1], time[2])
end
