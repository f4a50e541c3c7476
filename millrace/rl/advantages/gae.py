"""Generalized advantage estimation (arXiv 1506.02438), for PPO with a critic.

δ_t = r_t + γ·V_u − V_t and A_t = δ_t + γλ·A_u, where u is the next *generated* token: value and advantage are carried
over observations instead of being set to zero there. Returns are A + V, before A is whitened over the batch.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.returns import compact, restore, to_go, whitened
from millrace.rl.registry.options import Fraction

SEPARABLE = {"whiten": False}


def gae(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    values_bt: Tensor,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    whiten: bool = True,
    unbiased: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over generated tokens."""
    ahead_bt = torch.nn.functional.pad(compact(values_bt, mask_bt)[:, 1:], (0, 1))
    deltas_bt = token_rewards_bt + gamma * restore(ahead_bt, mask_bt) - values_bt
    advantages_bt = to_go(deltas_bt, mask_bt, gamma * lam)
    returns_bt = advantages_bt + values_bt
    if whiten:
        advantages_bt = whitened(advantages_bt, mask_bt, unbiased=unbiased)
    return advantages_bt, returns_bt
