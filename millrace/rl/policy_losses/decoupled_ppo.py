"""Decoupled PPO (arXiv 2110.00641; for stale rollouts AReaL, arXiv 2505.24298).

The policy that generated the tokens (behaviour) differs from the policy that the update stays close to (proximal, here
`old_logprobs_bt`). The loss is w·(clipped surrogate of π/π_prox) with w = π_prox/π_behaviour, which carries no
gradient. With `cap`, the loss of tokens whose w is above it is 0, as in AReaL's code.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clipped_surrogate, log_ratio
from millrace.rl.registry.options import AboveOne, Fraction, NonNegative


def decoupled_ppo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    behaviour_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    clip_low: Fraction = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = 3.0,
    cap: AboveOne | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate around a proximal policy, weighted for the policy that generated the tokens."""
    ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp()
    loss_bt, metrics_bt = clipped_surrogate(ratio_bt, advantages_bt, clip_low, clip_high, dual_clip)
    weight_bt = log_ratio(old_logprobs_bt, behaviour_logprobs_bt).exp().detach()
    if cap is not None:
        is_above_bt = weight_bt > cap
        weight_bt = weight_bt.masked_fill(is_above_bt, 0)
        metrics_bt["behaviour_cap_fraction"] = is_above_bt
    return loss_bt * weight_bt, {**metrics_bt, "behaviour_weight": weight_bt}
