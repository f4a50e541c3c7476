"""The optimal token baseline (arXiv 2602.07078): a group baseline for each token position.

A_t = G_t − B_t, where G is the return-to-go and B_t = Σ G_t·W_t / Σ W_t over the group's answers that reach position t.
W_t = Σ_{j ≤ t} (1 − 2π_j + Σπ²) estimates the squared gradient norm up to t from the probabilities alone. Positions
count generated tokens, so answers of several turns are aligned by the tokens that the policy generated. With
`zero_tail` the baseline is 0, as in verl, where only one answer of the group is left; otherwise it is that answer's
return, which makes A 0 there. Importance weights, if given, scale W by their square.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups
from millrace.rl.formulas.returns import compact, restore, to_go
from millrace.rl.registry.options import NonNegative

SEPARABLE = True


def optimal_token_baseline(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    old_logprobs_bt: Tensor,
    sum_pi_squared_bt: Tensor,
    weights_bt: Tensor | None = None,
    zero_tail: bool = True,
    eps: NonNegative = 1e-8,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Return-to-go minus a baseline for each token position, weighted by the gradient's norm so far."""
    groups = Groups.of(group_b, mask_bt)
    returns_bt = to_go(token_rewards_bt, mask_bt, 1.0)
    energy_bt = 1 - 2 * old_logprobs_bt.exp() + sum_pi_squared_bt
    if weights_bt is not None:
        energy_bt = energy_bt * weights_bt.square()
    there_bt = compact(torch.ones_like(returns_bt), mask_bt)
    return_bt = compact(returns_bt, mask_bt)
    weight_bt = compact(energy_bt, mask_bt).cumsum(dim=-1) * there_bt
    baseline_bt = groups.sum(return_bt * weight_bt) / (groups.sum(weight_bt) + eps)
    if zero_tail:
        baseline_bt = torch.where(groups.sum(there_bt) > 1, baseline_bt, 0)
    advantages_bt = restore(return_bt - baseline_bt, mask_bt)
    alone_bt = returns_bt if singleton == "reward" else torch.zeros_like(returns_bt)
    return torch.where(groups.sizes_b[:, None] > 1, advantages_bt, alone_bt), returns_bt
