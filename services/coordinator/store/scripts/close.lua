-- Drops a part of what is in flight; with the last part the ledger ends, but not if a step to go back to is given: then
-- what is dropped waits to be issued again as soon as undo.lua has run, until a transition of the job ends the ledger.
-- KEYS: base. ARGV: step, DropReason, most prompts that are dropped, and the step to go back to or nothing.
-- Answers how many were dropped, and whether that was the last part.
if not ARGV[4] then return close(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])) end
redis.call('HSET', KEYS[1] .. ':notes', 'undoing_after', ARGV[4])
return {drop_some(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]))}
