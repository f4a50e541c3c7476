"""Several rewards, each normalised separately (GDPO, arXiv 2601.05242).

Each reward is normalised within the group as in GRPO; their weighted sum is normalised over the batch. If the sum of
rewards were normalised instead, the reward with the largest spread would dominate. The batch is normalised over
sequences as in the paper; verl whitens over tokens, which gives long answers more weight (`batch` "tokens"). Only
`rewards_bk` is read, so a penalty has to be one of the rewards.
"""

from typing import Literal

import torch
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.formulas.returns import whitened
from millrace.rl.registry.options import NonNegative, Numbers


def gdpo(
    *,
    mask_bt: Tensor,
    group_b: Tensor,
    rewards_bk: Tensor,
    weights: Numbers | None = None,
    batch: Literal["sequences", "tokens"] = "sequences",
    ddof: Literal[0, 1] = 1,
    eps: NonNegative = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Each reward normalised within its group, and their weighted sum normalised over the batch."""
    count = rewards_bk.shape[1]
    weights = weights or (1.0,) * count
    if len(weights) != count:
        raise InvalidJob(
            f"The advantage 'gdpo' has {len(weights)} weights for {count} rewards.", "Give one weight a reward."
        )
    groups = Groups.of(group_b, mask_bt)
    normalised_bk = groups.scaled(groups.centred(rewards_bk, "zero"), rewards_bk, ddof, eps)
    sums_b = normalised_bk @ torch.tensor(weights, dtype=rewards_bk.dtype, device=rewards_bk.device)
    if batch == "sequences":
        whole = Groups.of(torch.zeros_like(group_b), mask_bt)
        return on_tokens(whole.scaled(whole.centred(sums_b, "zero"), sums_b, ddof, eps), mask_bt)
    advantages_bt = whitened(on_tokens(sums_b, mask_bt)[0], mask_bt, unbiased=ddof == 1)
    return advantages_bt, advantages_bt
