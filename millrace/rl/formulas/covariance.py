"""The covariance of advantage and log-probability by token, which makes entropy fall (arXiv 2505.22617)."""

import torch
from torch import Tensor


def covariances(logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """[B, T]: (A − mean A)·(log π − mean log π) with means over the tokens that count. It has no gradient."""
    count = mask_bt.sum().clamp(min=1)
    logprobs_bt, advantages_bt = logprobs_bt.detach(), advantages_bt.detach()
    mean_logprob = logprobs_bt.masked_fill(~mask_bt, 0).sum() / count
    mean_advantage = advantages_bt.masked_fill(~mask_bt, 0).sum() / count
    return (advantages_bt - mean_advantage) * (logprobs_bt - mean_logprob)


def chosen(keys_bt: Tensor, eligible_bt: Tensor, count: int) -> Tensor:
    """bool [B, T]: the `count` eligible tokens with the largest keys, or all eligible tokens if there are fewer."""
    ranked = keys_bt.masked_fill(~eligible_bt, -torch.inf).flatten().argsort(descending=True, stable=True)
    selected = torch.zeros_like(eligible_bt).flatten()
    selected[ranked[:count]] = True
    return selected.view_as(eligible_bt) & eligible_bt


def scattered(logprobs_bt: Tensor) -> Tensor:
    """[B, T]: numbers in [0, 1) that look random but are a function of each token's log-probability.

    A choice of tokens by these numbers is therefore the same for any order, padding and device of the batch.
    """
    mixed_bt = torch.sin(logprobs_bt.detach().double() * 12_345.678) * 98_765.432
    return mixed_bt - mixed_bt.floor()
