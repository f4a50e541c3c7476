"""Pass@k with k the group's size (arXiv 2503.19595): only the best answer is rewarded, for what it adds.

With the leave-one-out baseline of max(rewards), the best answer gets r₁ − r₂, the difference of the two largest
rewards, and all other answers get 0. With `std` this is divided by the group's standard deviation as in GRPO. Where two
answers share the largest reward, all get 0.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.drops import equal
from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.registry.options import NonNegative

SEPARABLE = True


def grpo_passk(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    std: bool = True,
    ddof: Literal[0, 1] = 1,
    eps: NonNegative = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The best answer of a group gets its distance to the second best; all others get 0."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    is_best_b = equal(rewards_b, groups.max(rewards_b))
    lowest = torch.finfo(rewards_b.dtype).min
    second_b = groups.max(torch.where(is_best_b, lowest, rewards_b))
    is_alone_b = groups.sum(is_best_b.to(rewards_b.dtype)) == 1
    advantages_b = torch.where(is_best_b & is_alone_b & (groups.sizes_b > 1), rewards_b - second_b, 0)
    if std:
        advantages_b = groups.scaled(advantages_b, rewards_b, ddof, eps)
    return on_tokens(advantages_b, mask_bt)
