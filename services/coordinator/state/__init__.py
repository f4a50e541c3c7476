"""Jobs, members, prompts, groups and the ledger as data. No I/O."""
