"""IcePop (Ring-1T, arXiv 2510.18855) by sequence: w = product of π_train/π_rollout inside the bounds, 0 outside.

The product is the ratio of the sequence's probabilities, the same weight for each of its tokens. A sequence outside the
bounds gives no gradient but stays in the denominators.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import bounds_metrics, clamped
from millrace.rl.registry.options import RatioBounds

SEPARABLE = True


def icepop_sequence(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, bounds: RatioBounds = (0.5, 5.0)
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its sequence's ratio, or by 0 where that is out of bounds."""
    ratio_b1 = clamped((train_logprobs_bt - rollout_logprobs_bt).sum(dim=-1, keepdim=True)).exp()
    is_outside_b1 = (ratio_b1 < bounds[0]) | (ratio_b1 > bounds[1])
    metrics = bounds_metrics(ratio_b1, *bounds) | {"rollout_is_oob_ratio": is_outside_b1}
    return ratio_b1.masked_fill(is_outside_b1, 0), mask_bt, metrics
