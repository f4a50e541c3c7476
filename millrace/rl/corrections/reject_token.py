"""Rejects tokens whose two probabilities are far apart (hard trust region, arXiv 2512.23075).

k1 keeps ratios π_train/π_rollout within `bounds`; k2 and k3 keep estimates of at most `limit`.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.ratios import divergences, is_close, rejected
from millrace.rl.registry.options import Positive, RatioBounds

SEPARABLE = True


def reject_token(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    bounds: RatioBounds = (0.5, 2.0),
    limit: Positive = 0.2,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops tokens that are out of bounds."""
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    return rejected(f"token_{estimator}", is_close(estimator, divergence_bt, bounds, limit), mask_bt)
