"""Group sequence policy optimization (arXiv 2507.18071).

The ratio of a sequence is the geometric mean of its tokens' ratios, s = exp(mean log(π/π_old)), and is clipped as a
whole. `per_token` is the paper's GSPO-token: it has the value of s and each token's own gradient, for advantages that
differ within a sequence. verl always uses it; if A is constant in a sequence the two are equal. Aggregate with
`seq-mean-token-mean`.
"""

from torch import Tensor

from millrace.rl.formulas.ratios import clamped, clipped_surrogate, sequence_mean
from millrace.rl.registry.options import Fraction, NonNegative


def gspo(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    clip_low: Fraction = 3e-4,
    clip_high: NonNegative = 4e-4,
    per_token: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of the sequence's ratio."""
    sequence_log_ratio_b1 = clamped(sequence_mean(logprobs_bt - old_logprobs_bt, mask_bt))
    if per_token:
        sequence_log_ratio_b1 = sequence_log_ratio_b1.detach() + logprobs_bt - logprobs_bt.detach()
    return clipped_surrogate(sequence_log_ratio_b1.exp(), advantages_bt, clip_low, clip_high)
