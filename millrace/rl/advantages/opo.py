"""On-policy RL with the optimal reward baseline (arXiv 2505.23585).

A = r − Σ(length·r)/Σlength over the group: the baseline of least variance if the norm of a gradient grows with length.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens

SEPARABLE = True


def opo(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's length-weighted mean."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    lengths_b = mask_bt.sum(dim=-1).to(rewards_b.dtype)
    baseline_b = groups.sum(lengths_b * rewards_b) / groups.sum(lengths_b).clamp(min=1)
    alone_b = rewards_b if singleton == "reward" else torch.zeros_like(rewards_b)
    centred_b = torch.where(groups.are_equal(rewards_b), 0, rewards_b - baseline_b)
    return on_tokens(torch.where(groups.sizes_b > 1, centred_b, alone_b), mask_bt)
