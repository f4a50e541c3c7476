"""DPPO with the binary KL divergence (arXiv 2602.04879): −sg(min(r, cap))·A·log π inside the trust region, else 0.

KL = π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)) is the divergence of "this token or any other". A token
is outside the region when KL > `high`, π > π_old and A > 0, or when KL > `low`, π < π_old and A < 0. In the paper π_old
is the policy that generated the tokens, so the job should set `old_logprobs: rollout`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive

NEAREST_ONE = -1e-7
"""Log-probabilities are limited to this, so that the probability of the other tokens is not 0 in float32."""


def dppo_kl(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    low: Positive = 0.05,
    high: Positive = 0.05,
    cap: Positive = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within a trust region of KL divergence."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp().detach()
    divergence_bt = _binary_kl(old_logprobs_bt, logprobs_bt.detach())
    too_high_bt = (divergence_bt > high) & (ratio_bt > 1)
    too_low_bt = (divergence_bt > low) & (ratio_bt < 1)
    is_outside_bt = torch.where(advantages_bt > 0, too_high_bt, too_low_bt)
    loss_bt = -ratio_bt.clamp(max=cap) * advantages_bt * logprobs_bt
    return loss_bt.masked_fill(is_outside_bt, 0), {"clip_fraction": is_outside_bt, "cap_fraction": ratio_bt > cap}


def _binary_kl(old_logprobs_bt: Tensor, logprobs_bt: Tensor) -> Tensor:
    old_other_bt = (-torch.expm1(old_logprobs_bt.clamp(max=NEAREST_ONE))).log()
    other_bt = (-torch.expm1(logprobs_bt.clamp(max=NEAREST_ONE))).log()
    return old_logprobs_bt.exp() * (old_logprobs_bt - logprobs_bt) + old_other_bt.exp() * (old_other_bt - other_bt)
