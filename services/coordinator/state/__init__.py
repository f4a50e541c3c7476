"""Jobs, members, groups and the ledger as data. No I/O."""
