"""DPPO (arXiv 2602.04879): −sg(min(r, cap))·A·log π inside a trust region, else 0.

The trust region bounds a divergence of "this token or any other". In the paper π_old is the policy that generated the
tokens, so the job should set `old_logprobs: rollout`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive

NEAREST_ONE = -1e-7
"""Log-probabilities are limited to this, so that the probability of the other tokens is not 0 in float32."""


def dppo_tv(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    low: Positive = 0.15,
    high: Positive = 0.15,
    cap: Positive = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within a trust region of total variation.

    A token is outside when its probability has already moved too far in the direction of its advantage:
    π − π_old > high for A > 0, π_old − π > low for A < 0.
    """
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp().detach()
    moved_bt = (logprobs_bt.exp() - old_logprobs_bt.exp()).detach()
    is_outside_bt = torch.where(advantages_bt > 0, moved_bt > high, moved_bt < -low)
    return _inside(is_outside_bt, ratio_bt, advantages_bt, logprobs_bt, cap)


def dppo_kl(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    low: Positive = 0.05,
    high: Positive = 0.05,
    cap: Positive = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within a trust region of KL divergence.

    KL = π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)). A token is outside when KL > `high`, π > π_old and
    A > 0, or when KL > `low`, π < π_old and A < 0.
    """
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp().detach()
    divergence_bt = _binary_kl(old_logprobs_bt, logprobs_bt.detach())
    too_high_bt, too_low_bt = (divergence_bt > high) & (ratio_bt > 1), (divergence_bt > low) & (ratio_bt < 1)
    is_outside_bt = torch.where(advantages_bt > 0, too_high_bt, too_low_bt)
    return _inside(is_outside_bt, ratio_bt, advantages_bt, logprobs_bt, cap)


def _inside(
    is_outside_bt: Tensor, ratio_bt: Tensor, advantages_bt: Tensor, logprobs_bt: Tensor, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with 0 outside of the trust region, and its metrics."""
    loss_bt = -ratio_bt.clamp(max=cap) * advantages_bt * logprobs_bt
    return loss_bt.masked_fill(is_outside_bt, 0), {"clip_fraction": is_outside_bt, "cap_fraction": ratio_bt > cap}


def _binary_kl(old_logprobs_bt: Tensor, logprobs_bt: Tensor) -> Tensor:
    old_other_bt = (-torch.expm1(old_logprobs_bt.clamp(max=NEAREST_ONE))).log()
    other_bt = (-torch.expm1(logprobs_bt.clamp(max=NEAREST_ONE))).log()
    return old_logprobs_bt.exp() * (old_logprobs_bt - logprobs_bt) + old_other_bt.exp() * (old_other_bt - other_bt)
