"""KL divergence of the policy from a reference, estimated on the tokens that the policy sampled.

With d = log π_ref − log π (http://joschu.net/blog/kl-approx.html): k1 = −d, k2 = d²/2, k3 = e^d − d − 1, abs = |d|.
As a *reward* penalty k1 and k3 are unbiased estimates of KL(π‖π_ref). As a *loss* what counts is the gradient: k1's is
zero in expectation, k2's is that of KL(π‖π_ref), k3's is that of KL(π_ref‖π). The straight-through forms `k1+` and
`k3+` have the value of k1 or k3 and the gradient of k2.
"""

import torch
from torch import Tensor

from millrace.rl.registry.catalogue import KL_ESTIMATORS

LOG_RATIO_LIMIT = 20.0
"""Beyond e^20 a ratio says only that the policies are apart; its exponential would overflow in fp32."""


def kl(name: str, logprobs_bt: Tensor, ref_logprobs_bt: Tensor) -> Tensor:
    """The estimate a token, [B, T]; differentiable in logprobs_bt. Raises ValueError for an unknown name."""
    if name not in KL_ESTIMATORS:
        raise ValueError(f"kl = {name!r}: choose one of {', '.join(KL_ESTIMATORS)}.")
    delta_bt = ref_logprobs_bt.detach() - logprobs_bt
    if name.endswith("+"):
        square_bt = delta_bt.square() / 2
        return _estimate(name[:-1], delta_bt).detach() + square_bt - square_bt.detach()
    return _estimate(name, delta_bt)


def _estimate(name: str, delta_bt: Tensor) -> Tensor:
    if name == "k1":
        return -delta_bt
    if name == "k2":
        return delta_bt.square() / 2
    if name == "abs":
        return delta_bt.abs()
    delta_bt = delta_bt.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(delta_bt) - delta_bt


def penalised(token_rewards_bt: Tensor, kl_bt: Tensor, mask_bt: Tensor, coefficient: float) -> Tensor:
    """Token rewards less the KL penalty: r − coefficient · kl where the mask is true, 0 elsewhere. No gradient."""
    return torch.where(mask_bt.bool(), token_rewards_bt - coefficient * kl_bt.detach(), 0)


def adapted(coefficient: float, *, observed: float, target: float, horizon: float, samples: int) -> float:
    """The next KL coefficient of the adaptive rule of arXiv 1909.08593.

    coefficient · (1 + clip(observed/target − 1, −0.2, 0.2) · samples/horizon): `observed` is the mean KL of the last
    step, of `samples` trajectories; `horizon` is the number of trajectories over which an error is corrected.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
