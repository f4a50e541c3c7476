"""A histogram of log-ratios whose counts add up over micro-batches and ranks, and quantiles from it."""

import torch
from torch import Tensor

BINS = 2001
FINEST = 1e-3
"""Bins are even in asinh(log ratio / FINEST): 1e-5 wide where the ratio is 1, 1 % of |log ratio| far from it."""
REACH = 10.6
"""asinh(20 / 1e-3): log-ratios are clamped to ±20."""


def histogram(log_ratio_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """float64 [BINS]: how many of the tokens that count are in each bin.

    It counts with index_add, which unlike bincount does not make the host wait for the device.
    """
    position_bt = torch.asinh(log_ratio_bt.double() / FINEST) / REACH
    bins_bt = ((position_bt + 1) / 2 * (BINS - 1)).round().long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.float64, device=log_ratio_bt.device)
    return counts.index_add_(0, bins_bt.flatten(), mask_bt.flatten().double())


def quantile(counts: Tensor, share: float) -> float:
    """The ratio, not the log-ratio, below which `share` of the counted tokens lie; `counts` must not be all 0."""
    shares = counts.cumsum(0) / counts.sum()
    index = int((shares < share - 1e-12).sum())
    position = torch.tensor(2 * index / (BINS - 1) - 1, dtype=torch.float64)
    return float((torch.sinh(position * REACH) * FINEST).exp())
