"""Tokens whose policy loss is set to 0. They stay in the denominators, and in the KL and the entropy of the loss."""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import sequence_mean

ROUNDING = 1e-9


@torch.no_grad()
def high_entropy(entropy_bt: Tensor, mask_bt: Tensor, fraction: float) -> tuple[Tensor, float]:
    """The tokens of the highest entropy (arXiv 2506.01939), bool [B, T], and the smallest entropy among them, nats.

    entropy_bt is [B, T] of the whole batch. With N tokens in the mask, floor(fraction·(N − 1)) + 1 are kept, which are
    those at or above the quantile 1 − fraction as TRL computes it, and every token of the same entropy as the last of
    them. Without any token nothing is kept, and the entropy is 0.
    """
    mask_bt = mask_bt.bool()
    entropies = entropy_bt[mask_bt]
    if not entropies.numel():
        return mask_bt, 0.0
    kept = int(fraction * (entropies.numel() - 1) + ROUNDING) + 1
    threshold = entropies.kthvalue(entropies.numel() - kept + 1).values
    return mask_bt & (entropy_bt >= threshold), float(threshold)


@torch.no_grad()
def off_policy(
    logprobs_bt: Tensor, behaviour_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, limit: float
) -> Tensor:
    """The tokens that DeepSeek-V3.2 masks (arXiv 2512.02556, eq. 9), bool [B, T].

    They have a negative advantage and are in a sequence whose mean of log π_behaviour − log π is above `limit`, nats a
    token: a bad answer that the policy has moved away from. A sequence must not be divided over micro-batches.
    """
    mask_bt = mask_bt.bool()
    moved_b1 = sequence_mean(behaviour_logprobs_bt - logprobs_bt, mask_bt)
    return mask_bt & (advantages_bt < 0) & (moved_b1 > limit)
