"""Rejects sequences whose summed divergence is too large (arXiv 2512.23075).

k1: the product of the tokens' ratios π_train/π_rollout has to be within `bounds`; k2, k3: the sum of the estimates has
to be at most `limit`.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.ratios import divergences, is_close, rejected
from millrace.rl.registry.options import Positive, RatioBounds

SEPARABLE = True


def reject_sequence_sum(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    bounds: RatioBounds = (0.5, 2.0),
    limit: Positive = 1.0,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the sum over their tokens."""
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    sum_b1 = divergence_bt.sum(dim=-1, keepdim=True)
    return rejected(f"seq_sum_{estimator}", is_close(estimator, sum_b1, bounds, limit), mask_bt)
