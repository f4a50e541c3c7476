"""Truncated importance sampling: w = min(π_train/π_rollout, cap).

With `floor` the ratio is cut on both sides: max(floor, min(ratio, cap)).
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped, log_ratio, sequence_mean, truncated_by_sequence
from millrace.rl.registry.options import Fraction, Positive

SEPARABLE = True


def tis_token(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    cap: Positive = 2.0,
    floor: Fraction = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its own ratio, truncated.

    That is as in V-trace (arXiv 1802.01561).
    """
    ratio_bt = log_ratio(train_logprobs_bt, rollout_logprobs_bt).exp()
    is_high_bt, is_low_bt = ratio_bt > cap, ratio_bt < (floor or 1 / cap)
    metrics_bt = {"rollout_is_ratio_fraction_high": is_high_bt, "rollout_is_ratio_fraction_low": is_low_bt}
    return ratio_bt.clamp(floor, cap), mask_bt, metrics_bt


def tis_sequence(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    cap: Positive = 2.0,
    floor: Fraction = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its sequence's ratio, truncated.

    That is the product of the tokens' ratios. It is unbiased before it is truncated, and its variance grows with
    length.
    """
    ratio_b1 = clamped((train_logprobs_bt - rollout_logprobs_bt).sum(dim=-1, keepdim=True)).exp()
    weights_b1, metrics_b = truncated_by_sequence(ratio_b1, cap, floor)
    return weights_b1, mask_bt, metrics_b


def tis_geometric(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    cap: Positive = 2.0,
    floor: Fraction = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by the geometric mean of its sequence's ratios, truncated.

    This is no importance weight of tokens or sequences, but its scale does not depend on length. GSPO
    (arXiv 2507.18071) uses the same ratio between policies.
    """
    ratio_b1 = clamped(sequence_mean(train_logprobs_bt - rollout_logprobs_bt, mask_bt)).exp()
    weights_b1, metrics_b = truncated_by_sequence(ratio_b1, cap, floor)
    return weights_b1, mask_bt, metrics_b
