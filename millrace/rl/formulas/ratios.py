"""Importance ratios between two policies, from log-probabilities; PPO's clipped surrogate of them; and the rule of the
rejecting corrections: how far a token's two probabilities are apart, and how far is too far.

With w = π_train/π_rollout, k1 is log w. Its exponential is a ratio, so `bounds` are on that ratio and enclose 1.
k2 = (log w)²/2 and k3 = w − 1 − log w are never negative; `limit` bounds them from above. verl applies the bounds of
`*_k1` to −log w, so that "0.5_1.5" keeps a ratio of 1.8 and drops 0.6 there.
"""

import math

import torch
from torch import Tensor

from millrace.rl.formulas.divergence import LOG_RATIO_LIMIT


def log_ratio(logprobs_bt: Tensor, old_logprobs_bt: Tensor) -> Tensor:
    """[B, T]: log(π/π_old) of each token, clamped to ±20 so that its exponential stays finite in float32.

    For sums and means over a sequence take the plain difference and clamp the result: see `clamped`.
    """
    return clamped(logprobs_bt - old_logprobs_bt)


def clamped(log_ratios: Tensor) -> Tensor:
    """Log-ratios of any shape, clamped to ±20."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_mean(values_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """[B, 1]: the mean over each sequence's tokens that count; 0 for a sequence without any."""
    values_bt = values_bt.masked_fill(~mask_bt, 0)
    return values_bt.sum(dim=-1, keepdim=True) / mask_bt.sum(dim=-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    ratio_bt: Tensor, advantages_bt: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss max(−rA, −clip(r, 1 − clip_low, 1 + clip_high)·A), [B, T], and metrics of what was clipped.

    Where A < 0 and `dual_clip` is given, the loss is at most −dual_clip·A. `ratio_bt` may be [B, 1].
    """
    plain_bt = -ratio_bt * advantages_bt
    clipped_bt = -ratio_bt.clamp(1 - clip_low, 1 + clip_high) * advantages_bt
    loss_bt = torch.maximum(plain_bt, clipped_bt)
    is_clipped_bt = clipped_bt > plain_bt
    metrics_bt = {
        "clip_fraction": is_clipped_bt,
        "clip_fraction_low": is_clipped_bt & (advantages_bt < 0),
        "clip_fraction_high": is_clipped_bt & (advantages_bt > 0),
    }
    if dual_clip is not None:
        ceiling_bt = -dual_clip * advantages_bt
        is_capped_bt = (advantages_bt < 0) & (loss_bt > ceiling_bt)
        loss_bt = torch.where(is_capped_bt, ceiling_bt, loss_bt)
        metrics_bt["dual_clip_fraction"] = is_capped_bt
    return loss_bt, metrics_bt


def truncated_by_sequence(ratio_b1: Tensor, cap: float, floor: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights of whole sequences, [B, 1]: the ratio between `floor` and `cap`; and the metrics of `bounds_metrics`."""
    return ratio_b1.clamp(floor, cap), bounds_metrics(ratio_b1, floor or 1 / cap, cap)


def bounds_metrics(ratio_b1: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Metrics, [B], of ratios of whole sequences, [B, 1], before they are cut: what is outside `low` and `high`."""
    ratio_b = ratio_b1.squeeze(-1)
    return {
        "rollout_is_ratio_fraction_high": ratio_b > high,
        "rollout_is_ratio_fraction_low": ratio_b < low,
        "rollout_is_max": ratio_b,
        "rollout_is_min": ratio_b,
    }


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
