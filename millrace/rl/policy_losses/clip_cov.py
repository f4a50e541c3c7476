"""Clip-Cov (arXiv 2505.22617): PPO's surrogate, with the gradient of a few tokens cut whose covariance is high.

Candidates are the tokens with cov = (A − mean A)(log π − mean log π) inside (cov_low, cov_high) that PPO does not clip.
A share `fraction` of all tokens is drawn from them at random; their loss is 0. A caller who passes `selected_bt` from
`losses.selected_tokens` has one choice for the whole step; without it the choice is made among the tokens given,
with the current policy, as in verl.
"""

from torch import Tensor

from millrace.rl.formulas.covariance import chosen, covariances, scattered
from millrace.rl.formulas.ratios import clipped_surrogate, log_ratio
from millrace.rl.registry.options import AboveOne, Bounds, Fraction, NonNegative, OpenFraction


def clip_cov(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    selected_bt: Tensor | None = None,
    clip_low: Fraction = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    fraction: OpenFraction = 2e-4,
    bounds: Bounds = (1.0, 5.0),
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate without a few tokens of high covariance."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp()
    loss_bt, metrics_bt = clipped_surrogate(ratio_bt, advantages_bt, clip_low, clip_high, dual_clip)
    if selected_bt is None:
        selected_bt = select(
            logprobs_bt=logprobs_bt,
            advantages_bt=advantages_bt,
            mask_bt=mask_bt,
            eligible_bt=mask_bt & ~metrics_bt["clip_fraction"],
            fraction=fraction,
            bounds=bounds,
        )
    return loss_bt.masked_fill(selected_bt, 0), {**metrics_bt, "cov_fraction": selected_bt}


def select(
    *,
    logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    eligible_bt: Tensor | None = None,
    fraction: float,
    bounds: tuple[float, float],
) -> Tensor:
    """bool [B, T]: a random choice among the tokens with a covariance inside the bounds.

    It has `fraction` of all tokens that count, at least one; fewer if there are fewer candidates.
    """
    cov_bt = covariances(logprobs_bt, advantages_bt, mask_bt)
    within_bt = (cov_bt > bounds[0]) & (cov_bt < bounds[1]) & (mask_bt if eligible_bt is None else eligible_bt)
    return chosen(scattered(logprobs_bt), within_bt, max(1, int(fraction * int(mask_bt.sum()))))
