"""ReMax (arXiv 2310.10505): return-to-go minus the reward of the greedy answer to the same prompt."""

from torch import Tensor

from millrace.rl.formulas.returns import to_go

SEPARABLE = True


def remax(*, token_rewards_bt: Tensor, mask_bt: Tensor, greedy_rewards_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return-to-go minus the greedy answer's reward."""
    returns_bt = to_go(token_rewards_bt, mask_bt, 1.0)
    return returns_bt - greedy_rewards_b[:, None].to(returns_bt.dtype), returns_bt
