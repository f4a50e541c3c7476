"""The trainer: one gRPC server in front of a group of ranks.

Rank 0's control thread serves and decides (`service`); every rank's main thread does the torch work
(`worker`), told by rank 0 through a store (`commands`). `step` is the GRPO step, `publish` the sender's side of a
publication, `checkpoint` what survives. `backends/` hides who computes.
"""
