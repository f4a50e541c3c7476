"""Group policy gradient (arXiv 2504.02546): α·(r − mean(group)), for use with the loss `gpg`.

α = samples / samples with a gradient compensates for samples without one. The paper counts the samples of groups whose
rewards differ (`count` "groups"); verl counts rewards that are not zero ("rewards").
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens


def gpg(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    count: Literal["groups", "rewards"] = "groups",
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, scaled up to compensate for samples without a gradient."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    if count == "groups":
        gives_b = torch.where(groups.sizes_b > 1, ~groups.are_equal(rewards_b), singleton == "reward")
    else:
        gives_b = rewards_b != 0
    samples = groups.valid_b.sum().to(rewards_b.dtype)
    alpha = samples / (gives_b & groups.valid_b).sum().clamp(min=1)
    return on_tokens(alpha * groups.centred(rewards_b, singleton), mask_bt)
