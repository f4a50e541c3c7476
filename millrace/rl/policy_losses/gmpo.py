"""Geometric-mean policy optimization (arXiv 2507.20673).

The loss is −A·exp(mean over tokens of the clipped log-ratio). Log-ratios are clipped at clip_high where A > 0 and at
−clip_low where A < 0. Aggregate with `seq-mean-token-mean`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import clamped, sequence_mean
from millrace.rl.registry.options import NonNegative


def gmpo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    clip_low: NonNegative = 0.4,
    clip_high: NonNegative = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The geometric mean of the clipped ratios."""
    log_ratio_bt = logprobs_bt - old_logprobs_bt
    risen_bt, fallen_bt = log_ratio_bt.clamp(max=clip_high), log_ratio_bt.clamp(min=-clip_low)
    kept_bt = torch.where(advantages_bt < 0, fallen_bt, risen_bt)
    metrics_bt = {
        "clip_fraction": kept_bt != log_ratio_bt,
        "clip_fraction_low": kept_bt > log_ratio_bt,
        "clip_fraction_high": kept_bt < log_ratio_bt,
    }
    return -advantages_bt * clamped(sequence_mean(kept_bt, mask_bt)).exp(), metrics_bt
