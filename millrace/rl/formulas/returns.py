"""Sums over the tokens of an answer that skip the tokens that the policy did not generate."""

import torch
from torch import Tensor


def to_go(values_bt: Tensor, mask_bt: Tensor, factor: float) -> Tensor:
    """[B, T]: S_t = value_t + factor · S_u, where u is the next token that counts; 0 where the mask is false.

    Observations between turns neither add to the sum nor discount it. It is computed by doubling, in log2(T) passes
    over the tensor.
    """
    values_bt = compact(values_bt, mask_bt)
    span, weight = 1, factor
    while span < values_bt.shape[-1] and weight > 0:
        ahead_bt = torch.zeros_like(values_bt)
        ahead_bt[:, :-span] = values_bt[:, span:]
        values_bt = values_bt + weight * ahead_bt
        span, weight = span * 2, weight * weight
    return restore(values_bt, mask_bt)


def compact(values_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """[B, T]: each row's values that count, moved to the front of the row in their order, and 0 behind them."""
    return torch.where(mask_bt, values_bt, 0).gather(-1, _order(mask_bt))


def restore(values_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """The inverse of `compact`; 0 where the mask is false."""
    spread_bt = torch.zeros_like(values_bt).scatter(-1, _order(mask_bt), values_bt)
    return torch.where(mask_bt, spread_bt, 0)


def whitened(values_bt: Tensor, mask_bt: Tensor, *, unbiased: bool = True, eps: float = 1e-8) -> Tensor:
    """[B, T]: (value − mean) / sqrt(variance + eps) over all tokens that count; 0 elsewhere.

    With `unbiased` the variance is divided by count − 1. A single token becomes 0.
    """
    count = mask_bt.sum()
    centred_bt = torch.where(mask_bt, values_bt - torch.where(mask_bt, values_bt, 0).sum() / count.clamp(min=1), 0)
    variance = centred_bt.square().sum() / (count - int(unbiased)).clamp(min=1)
    return centred_bt * (variance + eps).rsqrt()


def _order(mask_bt: Tensor) -> Tensor:
    return (~mask_bt).to(torch.int8).argsort(dim=-1, stable=True)
