"""The memory ledger: what the memory of a trainer's rank and of a replica holds, by part, predicted from the model's
config and the job's options. Torch-free."""
