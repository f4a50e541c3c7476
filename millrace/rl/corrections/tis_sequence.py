"""Truncated importance sampling by sequence: w = min(product of the tokens' ratios, cap), the same for each token.

The product is the ratio of the sequence's probabilities. It is unbiased before it is truncated, and its variance grows
with length. `tis_geometric` uses the geometric mean instead.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped
from millrace.rl.registry.options import Positive


def tis_sequence(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, cap: Positive = 2.0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its sequence's ratio, truncated."""
    ratio_b1 = clamped((train_logprobs_bt - rollout_logprobs_bt).sum(dim=-1, keepdim=True)).exp()
    ratio_b = ratio_b1.squeeze(-1)
    metrics_b = {
        "rollout_is_ratio_fraction_high": ratio_b > cap,
        "rollout_is_ratio_fraction_low": ratio_b < 1 / cap,
        "rollout_is_max": ratio_b,
        "rollout_is_min": ratio_b,
    }
    return ratio_b1.clamp(max=cap), mask_bt, metrics_b
