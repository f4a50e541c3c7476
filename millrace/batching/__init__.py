"""From a step's sequences to each rank's micro-batches, and which groups are worth a step. Torch-free.

`plan.plan_microbatches` is what a trainer calls: `pack` fills micro-batches to a token budget, `balance` spreads them
over data-parallel ranks by what they cost. `filters` are the group filters and the overlong penalty.
"""
