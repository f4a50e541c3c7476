"""Truncated importance sampling by sequence: w = min(product of the tokens' ratios, cap), the same for each token.

The product is the ratio of the sequence's probabilities. It is unbiased before it is truncated, and its variance grows
with length. With `floor` it is cut on both sides. `tis_geometric` uses the geometric mean instead.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped, truncated_by_sequence
from millrace.rl.registry.options import Fraction, Positive

SEPARABLE = True


def tis_sequence(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    cap: Positive = 2.0,
    floor: Fraction = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its sequence's ratio, truncated."""
    ratio_b1 = clamped((train_logprobs_bt - rollout_logprobs_bt).sum(dim=-1, keepdim=True)).exp()
    weights_b1, metrics_b = truncated_by_sequence(ratio_b1, cap, floor)
    return weights_b1, mask_bt, metrics_b
