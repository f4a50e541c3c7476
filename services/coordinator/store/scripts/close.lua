-- Ends a ledger: drops what is in flight, and deletes what only a running job needs.
-- KEYS: base. ARGV: step, DropReason. Answers how many prompts were dropped.
return close(KEYS[1], ARGV[1], ARGV[2])
