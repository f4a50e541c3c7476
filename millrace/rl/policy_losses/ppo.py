"""PPO's clipped surrogate (arXiv 1707.06347), with asymmetric clipping (DAPO, arXiv 2503.14476) and dual clipping
(arXiv 1912.09729).

The loss is max(−rA, −clip(r, 1 − clip_low, 1 + clip_high)·A) with r = π/π_old. Where A < 0 it is at most
−dual_clip·A, which bounds the effect of a token of a bad answer whose probability has risen much; with `dual_clip` null
there is no such bound.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clipped_surrogate, log_ratio
from millrace.rl.registry.options import AboveOne, Fraction, NonNegative


def ppo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    clip_low: Fraction = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with asymmetric and dual clipping."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp()
    return clipped_surrogate(ratio_bt, advantages_bt, clip_low, clip_high, dual_clip)
