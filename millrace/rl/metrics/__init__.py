"""Metrics of losses and corrections, which combine over micro-batches and ranks.

`loss_metrics` and `mismatch` compute a micro-batch's contributions, `combining` makes the batch's metrics of them.
"""
