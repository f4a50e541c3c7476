"""REINFORCE with a leave-one-out baseline (arXiv 2402.14740).

A = r − mean of the group's other rewards = (G·r − Σr)/(G − 1).
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens

SEPARABLE = True


def rloo(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of the group's other rewards."""
    groups = Groups.of(group_b, mask_bt)
    sizes_b = groups.sizes_b.to(token_rewards_bt.dtype)
    centred_b = groups.centred(token_rewards_bt.sum(dim=-1), singleton)
    leave_one_out_b = (sizes_b / (sizes_b - 1).clamp(min=1)).where(groups.sizes_b > 1, 1)
    return on_tokens(centred_b * leave_one_out_b, mask_bt)
