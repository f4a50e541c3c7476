"""Metrics of a policy loss that add up over micro-batches and ranks.

A mean is reported as this micro-batch's share of it: the sum over the batch is the batch's mean. `*_max` and `*_min`
combine by maximum and minimum. Quantiles do not combine at all, so the importance ratios are counted in a histogram,
`ratio_counts`, from which `summarised` reads quantiles at the end.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate

BINS = 2001
FINEST = 1e-3
"""Bins are even in asinh(log ratio / FINEST): 1e-5 wide where the ratio is 1, 1 % of |log ratio| far off."""
REACH = 10.6
"""asinh(20 / 1e-3): log ratios are clamped to ±20."""
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


def ratio_metrics(log_ratio_bt: Tensor, mask_bt: Tensor, totals: BatchTotals) -> dict[str, Tensor]:
    """Of log π − log π_old, [B, T]: approximate KL(π_old‖π) by k1 and k3, mean, extremes and histogram of the ratio."""
    ratio_bt = log_ratio_bt.exp()
    infinity = torch.inf
    return {
        "approx_kl": aggregate("token-mean", -log_ratio_bt, mask_bt, totals=totals),
        "approx_kl_k3": aggregate("token-mean", torch.expm1(log_ratio_bt) - log_ratio_bt, mask_bt, totals=totals),
        "ratio_mean": aggregate("token-mean", ratio_bt, mask_bt, totals=totals),
        "ratio_max": torch.where(mask_bt, ratio_bt, -infinity).amax(),
        "ratio_min": torch.where(mask_bt, ratio_bt, infinity).amin(),
        "ratio_counts": _histogram(log_ratio_bt, mask_bt),
    }


def combined(shares: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The batch's metrics from its micro-batches'. Across ranks the same rules hold: sum, maximum for `*_max`, ..."""
    total: dict[str, Tensor] = {}
    for share in shares:
        for name, value in share.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = torch.maximum(total[name], value)
            elif name.endswith("_min"):
                total[name] = torch.minimum(total[name], value)
            else:
                total[name] = total[name] + value
    return total


def summarised(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Plain numbers. The histogram is read as quantiles (1 %, 50 %, 99 %) of the ratio, each exact to its bin; of what
    has a mean square, `<name>_mean_square`, the standard deviation and the effective sample size (as a share of the
    tokens) take its place.
    """
    numbers = {name: float(value) for name, value in metrics.items() if value.dim() == 0}
    # Extremes of no token at all say nothing.
    numbers = {n: v for n, v in numbers.items() if math.isfinite(v) or not n.endswith(("_max", "_min"))}
    for name in [name for name in numbers if name.endswith("_mean_square")]:
        square, mean = numbers.pop(name), numbers[name.removesuffix("_square")]
        stem = name.removesuffix("_mean_square")
        numbers[f"{stem}_std"] = math.sqrt(max(square - mean * mean, 0.0))
        numbers[f"{stem}_eff_sample_size"] = mean * mean / square if square > 0 else 0.0
    counts = metrics.get("ratio_counts")
    if counts is not None and counts.sum() > 0:
        shares = counts.cumsum(0) / counts.sum()
        for name, share in QUANTILES.items():
            numbers[name] = _bin_ratio(int((shares < share - 1e-12).sum()))
    return numbers


def _histogram(log_ratio_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """float64 [BINS]. Counted by index_add, which unlike bincount does not make the host wait for the device."""
    position_bt = torch.asinh(log_ratio_bt.double() / FINEST) / REACH
    bins_bt = ((position_bt + 1) / 2 * (BINS - 1)).round().long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.float64, device=log_ratio_bt.device)
    return counts.index_add_(0, bins_bt.flatten(), mask_bt.flatten().double())


def _bin_ratio(index: int) -> float:
    position = torch.tensor(2 * index / (BINS - 1) - 1, dtype=torch.float64)
    return float((torch.sinh(position * REACH) * FINEST).exp())
