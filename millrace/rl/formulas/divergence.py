"""KL divergence of the policy from a reference, estimated on the tokens that the policy sampled.

The estimates are, with d = log π_ref − log π (http://joschu.net/blog/kl-approx.html): k1 = −d, k2 = d²/2,
k3 = e^d − d − 1, abs = |d|. As a *reward* penalty, k1 and k3 are unbiased estimates of KL(π‖π_ref). As a *loss*, the
gradient matters: that of k1 is zero in expectation, that of k2 is the gradient of KL(π‖π_ref), that of k3 is the
gradient of KL(π_ref‖π). The straight-through forms `k1+`, `k3+` and `abs+` have the value of k1, k3 or abs and the
gradient of k2, as verl's names that end in "+".
"""

import torch
from torch import Tensor

from millrace.rl.registry.catalogue import KL_ESTIMATORS

LOG_RATIO_LIMIT = 20.0
"""Limit of log-ratios before they are exponentiated. e^20 says only that two policies differ, and in float32 the
exponential of a larger number may overflow."""


def kl(name: str, logprobs_bt: Tensor, ref_logprobs_bt: Tensor) -> Tensor:
    """[B, T]: the estimate for each token, differentiable in `logprobs_bt`. Raises ValueError for an unknown name."""
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
    """[B, T]: r − coefficient · kl where the mask is true, 0 elsewhere. It has no gradient."""
    return torch.where(mask_bt.bool(), token_rewards_bt - coefficient * kl_bt.detach(), 0)


def adapted(coefficient: float, *, observed: float, target: float, horizon: float, samples: int) -> float:
    """The next KL coefficient by the adaptive rule of arXiv 1909.08593.

    It is coefficient · (1 + clip(observed/target − 1, −0.2, 0.2) · samples/horizon). `observed` is the mean KL, nats a
    token, of the last step; `samples` is the number of its trajectories; `horizon` is the number of trajectories over
    which an error is corrected.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
