-- Answers a lease with the reason why there is no group.
-- KEYS: base. ARGV: entry, fence, step, DropReason, detail, seconds for which the answer is remembered.
-- Answers an outcome, as answer() in ledger.lua.
local outcome, prompt = answer(KEYS[1], ARGV[1], ARGV[2], nil, 'refuse', ARGV[6])
if outcome == 'done' then refuse(KEYS[1], prompt, ARGV[3], ARGV[4], ARGV[5]) end
return outcome
