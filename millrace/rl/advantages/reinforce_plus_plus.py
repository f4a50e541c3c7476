"""REINFORCE++ (arXiv 2501.03262): discounted return-to-go, whitened over all tokens of the batch.

The return is carried over observations between turns; `gamma` counts generated tokens only.
"""

from torch import Tensor

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
