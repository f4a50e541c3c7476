"""Rejects sequences with one token whose two probabilities are too far apart (arXiv 2512.23075).

k1: each ratio π_train/π_rollout has to be within `bounds`; k2, k3: the largest estimate has to be at most `limit`.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.ratios import divergences, is_close, rejected
from millrace.rl.registry.options import Positive, RatioBounds

SEPARABLE = True


def reject_sequence_max(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    bounds: RatioBounds = (0.1, 10.0),
    limit: Positive = 1.0,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by their worst token."""
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    is_close_bt = is_close(estimator, divergence_bt, bounds, limit) | ~mask_bt
    return rejected(f"seq_max_{estimator}", is_close_bt.all(dim=-1, keepdim=True), mask_bt)
