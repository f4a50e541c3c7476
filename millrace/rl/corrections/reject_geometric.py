"""Rejects sequences whose geometric mean ratio is out of bounds (arXiv 2512.23075).

exp(mean log(π_train/π_rollout)) does not depend on length, so the bounds can be tight.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import is_close, rejected, sequence_mean
from millrace.rl.registry.options import RatioBounds

SEPARABLE = True


def reject_geometric(
    *, train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, bounds: RatioBounds = (0.99, 1.01)
) -> tuple[None, Tensor, dict[str, Tensor]]:
    """Drops sequences by the geometric mean of their ratios."""
    mean_b1 = sequence_mean(train_logprobs_bt - rollout_logprobs_bt, mask_bt)
    return rejected("seq_mean_k1", is_close("k1", mean_b1, bounds, 0.0), mask_bt)
