"""Truncated importance sampling by token: w = min(π_train/π_rollout, cap) (as in V-trace, arXiv 1802.01561)."""

from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive


def tis_token(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, cap: Positive = 2.0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its own ratio, truncated."""
    ratio_bt = log_ratio(train_logprobs_bt, rollout_logprobs_bt).exp()
    metrics_bt = {"rollout_is_ratio_fraction_high": ratio_bt > cap, "rollout_is_ratio_fraction_low": ratio_bt < 1 / cap}
    return ratio_bt.clamp(max=cap), mask_bt, metrics_bt
