"""Soft adaptive policy optimization (arXiv 2511.20347): −A·(4/τ)·σ(τ(r − 1)).

A smooth gate replaces clipping: its slope is 1 at r = 1 and falls on both sides, faster for A < 0 (τ_negative).
Aggregate with `seq-mean-token-mean`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive


def sapo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    tau_positive: Positive = 1.0,
    tau_negative: Positive = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A sigmoid gate on the ratio instead of clipping."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp()
    tau_bt = torch.full_like(ratio_bt, tau_positive).masked_fill(advantages_bt < 0, tau_negative)
    gate_bt = torch.sigmoid(tau_bt * (ratio_bt - 1))
    return -advantages_bt * gate_bt * 4 / tau_bt, {"gate_slope": (4 * gate_bt * (1 - gate_bt)).detach()}
