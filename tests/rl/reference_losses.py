"""Each policy loss once more, from its paper's formula, on plain lists: slow and independent of torch.

A loss takes the sequences of a batch, tokens that count only, and returns the loss of each token. `Tokens.frozen` are
the log-probabilities where the formula stops the gradient: equal in value to `logprobs`, but not moved by the finite
differences that gradients are compared with.
"""

import math
import statistics
from dataclasses import dataclass


@dataclass
class Tokens:
    """One sequence."""

    logprobs: list[float]
    frozen: list[float]
    old: list[float]
    behaviour: list[float]
    advantages: list[float]


Rows = list[list[float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    loss = -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


def _tokens(batch: list[Tokens], rule) -> Rows:
    """`rule` of (log π, frozen log π, log π_old, A) for every token."""
    return [[rule(*token) for token in zip(s.logprobs, s.frozen, s.old, s.advantages, strict=True)] for s in batch]


def ppo(batch, clip_low=0.2, clip_high=0.2, dual_clip=3.0):
    return _tokens(batch, lambda x, _, old, a: surrogate(math.exp(x - old), a, clip_low, clip_high, dual_clip))


def decoupled_ppo(batch, clip_low=0.2, clip_high=0.2, dual_clip=3.0, cap=None):
    plain = ppo(batch, clip_low, clip_high, dual_clip)
    weights = [[math.exp(p - b) for p, b in zip(s.old, s.behaviour, strict=True)] for s in batch]
    if cap is not None:
        weights = [[weight if weight <= cap else 0.0 for weight in row] for row in weights]
    return [[w * value for w, value in zip(*rows, strict=True)] for rows in zip(weights, plain, strict=True)]


def gspo(batch, clip_low=3e-4, clip_high=4e-4, per_token=False):
    rows = []
    for s in batch:
        values = s.frozen if per_token else s.logprobs
        ratio = math.exp(statistics.fmean(x - old for x, old in zip(values, s.old, strict=True))) if values else 1.0
        own = [math.exp(x - f) if per_token else 1.0 for x, f in zip(s.logprobs, s.frozen, strict=True)]
        rows.append(
            [surrogate(ratio * o, a, clip_low, clip_high, None) for o, a in zip(own, s.advantages, strict=True)]
        )
    return rows


def cispo(batch, clip_low=1.0, clip_high=4.0):
    return _tokens(batch, lambda x, frozen, old, a: -clip(math.exp(frozen - old), 1 - clip_low, 1 + clip_high) * a * x)


def sapo(batch, tau_positive=1.0, tau_negative=1.05):
    def rule(x, _, old, a):
        tau = tau_negative if a < 0 else tau_positive
        return -a * (4 / tau) / (1 + math.exp(-tau * (math.exp(x - old) - 1)))

    return _tokens(batch, rule)


def gmpo(batch, clip_low=0.4, clip_high=0.4):
    """Ratios are clipped to (e^−low, e^high) as PPO's surrogate clips, then multiplied and rooted."""
    rows = []
    for s in batch:
        product = 1.0
        for x, old, a in zip(s.logprobs, s.old, s.advantages, strict=True):
            ratio = math.exp(x - old)
            clipped = clip(ratio, math.exp(-clip_low), math.exp(clip_high))
            product *= min(ratio, clipped) if a >= 0 else max(ratio, clipped)
        rows.append([-a * product ** (1 / len(s.old)) for a in s.advantages])
    return rows


def gpg(batch):
    return _tokens(batch, lambda x, _, __, a: -a * x)


def dro(batch, beta=0.1):
    return _tokens(batch, lambda x, _, old, a: -(a * x - 0.5 * beta * (x - old) ** 2))


def _covariances(batch) -> Rows:
    flat_a = [a for s in batch for a in s.advantages]
    flat_x = [x for s in batch for x in s.frozen]
    mean_a, mean_x = statistics.fmean(flat_a), statistics.fmean(flat_x)
    return [[(a - mean_a) * (x - mean_x) for a, x in zip(s.advantages, s.frozen, strict=True)] for s in batch]


def clip_cov(batch, clip_low=0.2, clip_high=0.2, fraction=0.9, bounds=(1.0, 5.0)):
    """With a fraction so large that every token within the bounds is chosen."""
    rows = ppo(batch, clip_low, clip_high, None)
    for s, row, covs in zip(batch, rows, _covariances(batch), strict=True):
        for t, cov in enumerate(covs):
            plain = -math.exp(s.frozen[t] - s.old[t]) * s.advantages[t]
            is_clipped = surrogate(math.exp(s.frozen[t] - s.old[t]), s.advantages[t], clip_low, clip_high, None) > plain
            if bounds[0] < cov < bounds[1] and not is_clipped:
                row[t] = 0.0
    return rows


def kl_cov(batch, fraction=2e-4, coefficient=1.0):
    rows = _tokens(batch, lambda x, _, old, a: -math.exp(x - old) * a)
    covs = _covariances(batch)
    places = sorted(((cov, i, t) for i, row in enumerate(covs) for t, cov in enumerate(row)), reverse=True)
    for _, i, t in places[: max(1, int(fraction * len(places)))]:
        rows[i][t] += coefficient * abs(batch[i].logprobs[t] - batch[i].old[t])
    return rows


def dppo_tv(batch, low=0.15, high=0.15, cap=20.0):
    def rule(x, frozen, old, a):
        moved = math.exp(frozen) - math.exp(old)
        if (a > 0 and moved > high) or (a < 0 and moved < -low):
            return 0.0
        return -min(math.exp(frozen - old), cap) * a * x

    return _tokens(batch, rule)


def dppo_kl(batch, low=0.05, high=0.05, cap=20.0):
    def rule(x, frozen, old, a):
        p, q = math.exp(old), math.exp(frozen)
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        if (a > 0 and q > p and divergence > high) or (a < 0 and q < p and divergence > low):
            return 0.0
        return -min(q / p, cap) * a * x

    return _tokens(batch, rule)
