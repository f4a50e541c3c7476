"""Rejects sequences whose mean divergence is too large (arXiv 2512.23075).

k2, k3: the mean over a sequence's tokens has to be at most `limit`. k1: the geometric mean of the ratios
π_train/π_rollout has to be within `bounds`, as in `reject_geometric`.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.ratios import divergences, is_close, rejected, sequence_mean
from millrace.rl.registry.options import Positive, RatioBounds

SEPARABLE = True


def reject_sequence_mean(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    bounds: RatioBounds = (0.5, 2.0),
    limit: Positive = 0.01,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the mean over their tokens."""
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    mean_b1 = sequence_mean(divergence_bt, mask_bt)
    return rejected(f"seq_mean_{estimator}", is_close(estimator, mean_b1, bounds, limit), mask_bt)
