"""The rule of the rejecting corrections: how far a token's two probabilities are apart, and how far is too far.

With w = π_train/π_rollout, k1 is log w. Its exponential is a ratio, so `bounds` are on that ratio and enclose 1.
k2 = (log w)²/2 and k3 = w − 1 − log w are never negative; `limit` bounds them from above. verl applies the bounds of
`*_k1` to −log w, so that "0.5_1.5" keeps a ratio of 1.8 and drops 0.6 there.
"""

import math

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import clamped


def divergences(estimator: str, log_ratio_bt: Tensor) -> Tensor:
    """[B, T]: the estimate k1, k2 or k3 of each token. Only what is exponentiated, in k3, is clamped."""
    if estimator == "k1":
        return log_ratio_bt
    if estimator == "k2":
        return log_ratio_bt.square() / 2
    return torch.expm1(clamped(log_ratio_bt)) - log_ratio_bt


def rejected(criterion: str, is_kept_bt: Tensor, mask_bt: Tensor) -> tuple[None, Tensor, dict[str, Tensor]]:
    """What a correction returns that rejects all but `is_kept_bt`, [B, T] or [B, 1].

    `criterion` is verl's name of it, as "token_k1" or "seq_mean_k3": under that name it reports the share of the tokens
    that it rejects, and the share of the sequences of which it rejects a token.
    """
    keep_bt = mask_bt & is_kept_bt
    is_cut_bt = mask_bt & ~keep_bt
    prefix = f"rollout_rs_{criterion}"
    return None, keep_bt, {f"{prefix}_masked_fraction": is_cut_bt, f"{prefix}_seq_masked_fraction": is_cut_bt.any(-1)}


def is_close(estimator: str, divergence: Tensor, bounds: tuple[float, float], limit: float) -> Tensor:
    """bool, the shape of `divergence`: whether it is within `bounds` (k1) or at most `limit` (k2, k3)."""
    if estimator != "k1":
        return divergence <= limit
    low = math.log(bounds[0]) if bounds[0] > 0 else -math.inf
    return (divergence >= low) & (divergence <= math.log(bounds[1]))
