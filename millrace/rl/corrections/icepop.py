"""IcePop (Ring-1T, arXiv 2510.18855): w = π_train/π_rollout inside the bounds, 0 outside.

What is outside the bounds gives no gradient but stays in the denominators.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import bounds_metrics, clamped, log_ratio
from millrace.rl.registry.options import RatioBounds

SEPARABLE = True


def icepop(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, bounds: RatioBounds = (0.5, 5.0)
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its ratio, or by 0 where that is out of bounds."""
    ratio_bt = log_ratio(train_logprobs_bt, rollout_logprobs_bt).exp()
    too_low_bt, too_high_bt = ratio_bt < bounds[0], ratio_bt > bounds[1]
    metrics_bt = {
        "rollout_is_ratio_fraction_high": too_high_bt,
        "rollout_is_ratio_fraction_low": too_low_bt,
        "rollout_is_oob_ratio": too_low_bt | too_high_bt,
    }
    return ratio_bt.masked_fill(too_low_bt | too_high_bt, 0), mask_bt, metrics_bt


def icepop_sequence(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, bounds: RatioBounds = (0.5, 5.0)
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by its sequence's ratio, or by 0 where that is out of bounds.

    That is the product of the tokens' ratios, the ratio of the sequence's probabilities.
    """
    ratio_b1 = clamped((train_logprobs_bt - rollout_logprobs_bt).sum(dim=-1, keepdim=True)).exp()
    is_outside_b1 = (ratio_b1 < bounds[0]) | (ratio_b1 > bounds[1])
    metrics = bounds_metrics(ratio_b1, *bounds) | {"rollout_is_oob_ratio": is_outside_b1}
    return ratio_b1.masked_fill(is_outside_b1, 0), mask_bt, metrics
