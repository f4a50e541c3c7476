"""Group-relative advantages (DeepSeekMath, arXiv 2402.03300).

A = (r − mean(group)) / (std(group) + eps), the same for each token of an answer. Without `std` it is the advantage of
Dr. GRPO (arXiv 2503.20783), which does not favour prompts that are nearly always or nearly never solved. With
`std_over` "batch" the standard deviation is that of all rewards of the step (Lite PPO, arXiv 2508.08221).
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.registry.options import NonNegative

SEPARABLE = {"std_over": "group"}


def grpo(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    std: bool = True,
    std_over: Literal["group", "batch"] = "group",
    ddof: Literal[0, 1] = 1,
    eps: NonNegative = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, divided by the standard deviation of the group or of the batch."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    advantages_b = groups.centred(rewards_b, singleton)
    if std:
        spread = groups if std_over == "group" else Groups.of(torch.zeros_like(group_b), mask_bt)
        advantages_b = spread.scaled(advantages_b, rewards_b, ddof, eps)
    return on_tokens(advantages_b, mask_bt)
