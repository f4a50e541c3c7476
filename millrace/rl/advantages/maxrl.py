"""MaxRL (arXiv 2602.02710): (r − μ)/μ with the group's mean reward μ; 0 where μ ≤ 0.

For rewards of 0 and 1 this follows the gradient of the log-likelihood of a correct answer, as a series that is cut off
at the group's size.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens

SEPARABLE = True


def maxrl(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, divided by that mean."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    mean_b = groups.mean(rewards_b)
    centred_b = groups.centred(rewards_b, singleton)
    return on_tokens(torch.where(mean_b > 0, centred_b / mean_b, 0), mask_bt)
