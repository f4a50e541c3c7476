-- Takes the lease of the leading coordinator. KEYS: lease, epoch. ARGV: place of the coordinator, its holder as JSON,
-- milliseconds of the lease, whether a lease of the same place is taken over, Unix time of the caller in milliseconds.
-- Answers {epoch}; {false, holder as JSON} where another coordinator leads.
-- Epochs follow the clock: a Redis that lost the newest one, in a failover or a restore, still gives a higher one.
local held = redis.call('GET', KEYS[1])
if held and not (ARGV[4] == '1' and cjson.decode(held).place == ARGV[1]) then return {false, held} end
local time = redis.call('TIME')
local now = math.max(tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), tonumber(ARGV[5]))
local epoch = string.format('%.0f', math.max(now, tonumber(redis.call('GET', KEYS[2]) or '0') + 1))
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {epoch}
