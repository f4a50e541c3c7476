-- How many leases each member holds. KEYS: base. Answers member, number ...
local queue, held = KEYS[1] .. ':queue', {}
if redis.call('EXISTS', queue) == 0 then return held end
for _, consumer in ipairs(redis.call('XPENDING', queue, GROUP)[4] or {}) do
  if consumer[1] ~= NOBODY then
    held[#held + 1] = consumer[1]
    held[#held + 1] = tonumber(consumer[2])
  end
end
return held
