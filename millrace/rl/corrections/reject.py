"""Hard trust regions (arXiv 2512.23075): tokens or sequences are rejected whose two probabilities are far apart.

With w = π_train/π_rollout, the estimate k1 is within `bounds` if the ratio w is; k2 and k3 have to be at most `limit`.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.ratios import divergences, is_close, rejected, sequence_mean
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


def reject_sequence_sum(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    bounds: RatioBounds = (0.5, 2.0),
    limit: Positive = 1.0,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the sum over their tokens.

    With k1 the product of the ratios has to be within the bounds.
    """
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    sum_b1 = divergence_bt.sum(dim=-1, keepdim=True)
    return rejected(f"seq_sum_{estimator}", is_close(estimator, sum_b1, bounds, limit), mask_bt)


def reject_sequence_mean(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    bounds: RatioBounds = (0.5, 2.0),
    limit: Positive = 0.01,
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the mean over their tokens.

    With k1 the geometric mean of the ratios has to be within the bounds, as in `reject_geometric`.
    """
    divergence_bt = divergences(estimator, train_logprobs_bt - rollout_logprobs_bt)
    mean_b1 = sequence_mean(divergence_bt, mask_bt)
    return rejected(f"seq_mean_{estimator}", is_close(estimator, mean_b1, bounds, limit), mask_bt)


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


def reject_geometric(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, bounds: RatioBounds = (0.99, 1.01)
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the geometric mean of their ratios.

    It does not depend on length, so the bounds can be tight.
    """
    mean_b1 = sequence_mean(train_logprobs_bt - rollout_logprobs_bt, mask_bt)
    return rejected("seq_mean_k1", is_close("k1", mean_b1, bounds, 0.0), mask_bt)
