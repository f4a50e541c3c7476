"""GRPO turn by turn, for episodes whose turns have rewards of their own (credit of turns as in arXiv 2505.11821).

G_k is what an episode earns from its turn k to its end. A = (G_k − mean) / (std + eps), the same for each token of the
turn, with mean and standard deviation over the episodes of the group that have a turn k. So a turn is not credited with
what was earned before it. Episodes of one turn get the advantage of `grpo`.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups
from millrace.rl.formulas.returns import to_go
from millrace.rl.registry.options import NonNegative

SEPARABLE = True


def grpo_turns(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    turn_starts_bt: Tensor,
    std: bool = True,
    ddof: Literal[0, 1] = 1,
    eps: NonNegative = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """What is earned from a turn on minus the group's mean at the same turn, divided by the standard deviation."""
    returns_bt = to_go(token_rewards_bt, mask_bt, 1.0)
    starts_bt = turn_starts_bt.bool() & mask_bt
    turn_bt = (starts_bt.cumsum(dim=-1) - 1).clamp(min=0)
    turns = int(turn_bt.max()) + 1
    zeros_bk = returns_bt.new_zeros(len(returns_bt), turns)
    from_turn_bk = zeros_bk.scatter_add(1, turn_bt, torch.where(starts_bt, returns_bt, 0))
    is_there_bk = zeros_bk.scatter_add(1, turn_bt, starts_bt.to(zeros_bk.dtype)) > 0
    numbers_bk = Groups.of(group_b, mask_bt).index_b[:, None] * turns + torch.arange(turns, device=mask_bt.device)
    groups, from_turn_n = Groups.of(numbers_bk.flatten(), is_there_bk.view(-1, 1)), from_turn_bk.flatten()
    advantages_n = groups.centred(from_turn_n, singleton)
    if std:
        advantages_n = groups.scaled(advantages_n, from_turn_n, ddof, eps)
    return advantages_n.view_as(zeros_bk).gather(1, turn_bt), returns_bt
