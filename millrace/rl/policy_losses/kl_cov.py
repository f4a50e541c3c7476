"""KL-Cov (arXiv 2505.22617): −rA, plus a penalty on the few tokens of the highest covariance.

cov = (A − mean A)(log π − mean log π). coefficient·|log r| is added to the loss of the share `fraction` of all tokens
that have the highest covariance, as in the authors' code. A caller who passes `selected_bt` from
`losses.selected_tokens` has one choice for the whole step; without it the choice is made among the tokens given,
with the current policy, as in verl.
"""

from torch import Tensor

from millrace.rl.formulas.covariance import chosen, covariances
from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import NonNegative, OpenFraction


def kl_cov(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    selected_bt: Tensor | None = None,
    fraction: OpenFraction = 2e-4,
    coefficient: NonNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a KL penalty on the tokens of the highest covariance."""
    log_ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt)
    if selected_bt is None:
        selected_bt = select(logprobs_bt=logprobs_bt, advantages_bt=advantages_bt, mask_bt=mask_bt, fraction=fraction)
    penalty_bt = coefficient * log_ratio_bt.abs() * selected_bt
    return -log_ratio_bt.exp() * advantages_bt + penalty_bt, {"cov_fraction": selected_bt}


def select(*, logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, fraction: float) -> Tensor:
    """bool [B, T]: the tokens of the highest covariance, `fraction` of all tokens that count and at least one."""
    cov_bt = covariances(logprobs_bt, advantages_bt, mask_bt)
    return chosen(cov_bt, mask_bt, max(1, int(fraction * int(mask_bt.sum()))))
