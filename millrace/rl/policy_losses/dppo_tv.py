"""DPPO with the binary total variation (arXiv 2602.04879): −sg(min(r, cap))·A·log π inside the trust region, else 0.

A token is outside the region when its probability has already moved too far in the direction of its advantage:
π − π_old > high for A > 0, π_old − π > low for A < 0. In the paper π_old is the policy that generated the tokens, so
the job should set `old_logprobs: rollout`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive


def dppo_tv(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    low: Positive = 0.15,
    high: Positive = 0.15,
    cap: Positive = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within a trust region of total variation."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp().detach()
    moved_bt = (logprobs_bt.exp() - old_logprobs_bt.exp()).detach()
    is_outside_bt = torch.where(advantages_bt > 0, moved_bt > high, moved_bt < -low)
    loss_bt = -ratio_bt.clamp(max=cap) * advantages_bt * logprobs_bt
    return loss_bt.masked_fill(is_outside_bt, 0), {"clip_fraction": is_outside_bt, "cap_fraction": ratio_bt > cap}
