"""Truncated importance sampling by token: w = min(π_train/π_rollout, cap) (as in V-trace, arXiv 1802.01561).

With `floor` the ratio is cut on both sides: max(floor, min(ratio, cap)).
"""

from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
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
    """Each token weighted by its own ratio, truncated."""
    ratio_bt = log_ratio(train_logprobs_bt, rollout_logprobs_bt).exp()
    is_high_bt, is_low_bt = ratio_bt > cap, ratio_bt < (floor or 1 / cap)
    metrics_bt = {"rollout_is_ratio_fraction_high": is_high_bt, "rollout_is_ratio_fraction_low": is_low_bt}
    return ratio_bt.clamp(floor, cap), mask_bt, metrics_bt
