"""Importance ratios between two policies, from log-probabilities, and PPO's clipped surrogate of them."""

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
