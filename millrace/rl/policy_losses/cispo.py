"""CISPO (MiniMax-M1, arXiv 2506.13585): −sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π.

Only the ratio is clipped, so every token keeps a gradient. With `clip_low` 1 the ratio is bounded from above only, as
in the paper and in TRL; verl clips both sides. arXiv 2510.13786 and TRL recommend the upper bound of 5.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Fraction, NonNegative


def cispo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    clip_low: Fraction = 1.0,
    clip_high: NonNegative = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighted by the clipped ratio, which carries no gradient."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp().detach()
    clipped_bt = ratio_bt.clamp(1 - clip_low, 1 + clip_high)
    metrics_bt = {
        "clip_fraction": ratio_bt != clipped_bt,
        "clip_fraction_low": ratio_bt < clipped_bt,
        "clip_fraction_high": ratio_bt > clipped_bt,
    }
    return -clipped_bt * advantages_bt * logprobs_bt, metrics_bt
