"""REINFORCE++ with a group baseline (arXiv 2501.03262): r − mean(group), whitened over all tokens of the batch."""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.formulas.returns import whitened


def reinforce_plus_plus_baseline(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    unbiased: bool = True,
    singleton: Literal["zero", "reward"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, whitened over the batch."""
    groups = Groups.of(group_b, mask_bt)
    centred_bt, _ = on_tokens(groups.centred(token_rewards_bt.sum(dim=-1), singleton), mask_bt)
    advantages_bt = whitened(centred_bt, mask_bt, unbiased=unbiased)
    return advantages_bt, advantages_bt
