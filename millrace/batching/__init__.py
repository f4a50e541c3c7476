"""Division of a step's sequences into each rank's micro-batches, and filters of groups. Needs no torch.

A trainer calls `plan.plan_microbatches`: `pack` fills micro-batches up to a token budget, `balance` distributes them
over data-parallel ranks by their cost. `filters` has the group filter and the penalty for overlong answers.
"""
