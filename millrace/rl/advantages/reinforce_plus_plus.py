"""REINFORCE++ (arXiv 2501.03262): discounted return-to-go, whitened over all tokens of the batch.

The return is carried over observations between turns; `gamma` counts generated tokens only. With a baseline
r − mean(group) takes its place.
"""

from typing import Literal

from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.formulas.returns import to_go, whitened
from millrace.rl.registry.options import Fraction


def reinforce_plus_plus(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    gamma: Fraction = 1.0,
    unbiased: bool = True,
) -> tuple[Tensor, Tensor]:
    """Discounted return-to-go, whitened over the batch."""
    returns_bt = to_go(token_rewards_bt, mask_bt, gamma)
    return whitened(returns_bt, mask_bt, unbiased=unbiased), returns_bt


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
