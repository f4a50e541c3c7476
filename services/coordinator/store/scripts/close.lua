-- Drops a part of what is in flight; with the last part the ledger ends.
-- KEYS: base. ARGV: step, DropReason, most prompts that are dropped. Answers how many were, and whether the ledger has
-- ended.
return close(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]))
