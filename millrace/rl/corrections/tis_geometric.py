"""Truncated weights from the geometric mean of a sequence's ratios: w = min(exp(mean log(π_train/π_rollout)), cap).

This is no importance weight of tokens or sequences, but its scale does not depend on length. GSPO (arXiv 2507.18071)
uses the same ratio between policies. With `floor` it is cut on both sides. `tis_sequence` uses the product instead.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped, sequence_mean, truncated_by_sequence
from millrace.rl.registry.options import Fraction, Positive

SEPARABLE = True


def tis_geometric(
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    cap: Positive = 2.0,
    floor: Fraction = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by the geometric mean of its sequence's ratios, truncated."""
    ratio_b1 = clamped(sequence_mean(train_logprobs_bt - rollout_logprobs_bt, mask_bt)).exp()
    weights_b1, metrics_b = truncated_by_sequence(ratio_b1, cap, floor)
    return weights_b1, mask_bt, metrics_b
