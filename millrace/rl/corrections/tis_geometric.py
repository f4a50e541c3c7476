"""Truncated weights from the geometric mean of a sequence's ratios: w = min(exp(mean log(π_train/π_rollout)), cap).

This is no importance weight of tokens or sequences, but its scale does not depend on length. GSPO (arXiv 2507.18071)
uses the same ratio between policies. `tis_sequence` uses the product instead.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped, sequence_mean
from millrace.rl.registry.options import Positive


def tis_geometric(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, cap: Positive = 2.0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token weighted by the geometric mean of its sequence's ratios, truncated."""
    ratio_b1 = clamped(sequence_mean(train_logprobs_bt - rollout_logprobs_bt, mask_bt)).exp()
    ratio_b = ratio_b1.squeeze(-1)
    metrics_b = {
        "rollout_is_ratio_fraction_high": ratio_b > cap,
        "rollout_is_ratio_fraction_low": ratio_b < 1 / cap,
        "rollout_is_max": ratio_b,
        "rollout_is_min": ratio_b,
    }
    return ratio_b1.clamp(max=cap), mask_bt, metrics_b
