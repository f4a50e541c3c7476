"""Aggregation of one value for each token to one number, exact over micro-batches and data-parallel ranks.

The mean of the micro-batches' means is not the mean of the batch. So each aggregation divides by counts of the *whole*
batch, `BatchTotals`. The sum of `aggregate(..., totals=totals)` over all micro-batches of all ranks is the batch's
value, and the sum of the gradients is the batch's gradient. A backend that averages gradients over its ranks has to
multiply by the number of ranks.
The contributions of micro-batches and ranks to a batch's metrics combine the same way: those to a mean add up, extremes
combine by maximum and minimum. Quantiles do not combine at all: the importance ratios are counted in a histogram, and
`summarised` reads the quantiles from it at the end.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from millrace.rl.registry.catalogue import AGGREGATIONS, NEEDS_HORIZON


@dataclass(frozen=True)
class BatchTotals:
    """Counts of a whole batch, over all its micro-batches and ranks."""

    tokens: int
    """Tokens that count, i.e. where the mask is true."""
    sequences: int
    """Sequences with at least one such token."""

    @classmethod
    def of(cls, mask_bt: Tensor) -> Self:
        """The counts of the sequences of `mask_bt`, [B, T]."""
        mask_bt = mask_bt.bool()
        return cls(int(mask_bt.sum()), int(mask_bt.any(dim=-1).sum()))

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(self.tokens + other.tokens, self.sequences + other.sequences)


def rescaling(mode: str, assumed: BatchTotals, actual: BatchTotals) -> float:
    """The factor from values that `aggregate` computed with `assumed` totals, before the batch was complete, to those
    of the batch with its `actual` totals; exactly 1 where they are equal."""
    factor = 1.0
    if mode == "token-mean":
        factor = max(assumed.tokens, 1) / max(actual.tokens, 1)
    if mode.startswith("seq-mean"):
        factor = max(assumed.sequences, 1) / max(actual.sequences, 1)
    return factor


def aggregate(
    mode: str,
    values_bt: Tensor,
    mask_bt: Tensor,
    *,
    totals: BatchTotals | None = None,
    horizon: int | None = None,
) -> Tensor:
    """Returns this micro-batch's contribution to the batch's value: a scalar in the dtype of `values_bt`, [B, T].

    | mode | value over the whole batch |
    |---|---|
    | token-mean | sum over tokens / tokens |
    | token-sum | sum over tokens |
    | token-sum-norm | sum over tokens / horizon |
    | seq-mean-token-sum | mean over sequences of their sums |
    | seq-mean-token-mean | mean over sequences of their means |
    | seq-mean-token-sum-norm | mean over sequences of their sums / horizon (Dr. GRPO, arXiv 2503.20783) |

    `totals` are the counts of the whole batch; without them the tensors are the whole batch. `horizon` is the largest
    number of tokens that an answer may have. A sequence must not be divided over micro-batches. The result is 0 if
    no token counts. Raises ValueError for an unknown mode, for different shapes, and for a missing horizon.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation = {mode!r}: choose one of {', '.join(AGGREGATIONS)}.")
    if values_bt.shape != mask_bt.shape:
        raise ValueError(f"values_bt is {tuple(values_bt.shape)} but mask_bt is {tuple(mask_bt.shape)}.")
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    values_bt = torch.where(mask_bt, values_bt, 0)
    if mode == "seq-mean-token-mean":
        values_bt = values_bt / mask_bt.sum(dim=-1, keepdim=True).clamp(min=1)
    total = values_bt.sum()
    if mode == "token-mean":
        total = total / max(totals.tokens, 1)
    if mode.startswith("seq-mean"):
        total = total / max(totals.sequences, 1)
    if mode in NEEDS_HORIZON:
        if horizon is None or horizon < 1:
            raise ValueError(f"aggregation = {mode!r} needs a horizon: pass the most tokens that an answer may have.")
        total = total / horizon
    return total


class Rule(Enum):
    """How two contributions to the same metric combine."""

    SUM = "sum"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"


EXTREMES = {
    "ratio_max": Rule.MAXIMUM,
    "ratio_min": Rule.MINIMUM,
    "rollout_corr/log_ppl_diff_max": Rule.MAXIMUM,
    "rollout_corr/log_ppl_diff_min": Rule.MINIMUM,
    "rollout_corr/rollout_is_max": Rule.MAXIMUM,
    "rollout_corr/rollout_is_min": Rule.MINIMUM,
    "rollout_corr/rollout_is_seq_max": Rule.MAXIMUM,
    "rollout_corr/rollout_is_seq_min": Rule.MINIMUM,
}
"""The metrics that are extremes. All others are sums of contributions, also those of a user's own function."""
WEIGHT_SQUARE = "rollout_corr/rollout_is_mean_square"
"""Mean of a correction's squared weights, which `summarised` replaces."""
HISTOGRAM = "ratio_counts"
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


def rule_of(name: str) -> Rule:
    """How the metric `name` combines."""
    return EXTREMES.get(name, Rule.SUM)


def combined(contributions: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The batch's metrics from the contributions of its micro-batches."""
    total: dict[str, Tensor] = {}
    for contribution in contributions:
        for name, value in contribution.items():
            total[name] = _combine(rule_of(name), total[name], value) if name in total else value
    return total


def _combine(rule: Rule, one: Tensor, other: Tensor) -> Tensor:
    match rule:
        case Rule.MAXIMUM:
            return torch.maximum(one, other)
        case Rule.MINIMUM:
            return torch.minimum(one, other)
        case Rule.SUM:
            return one + other


def summarised(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """The batch's metrics as plain numbers.

    The histogram of ratios becomes quantiles (1 %, 50 %, 99 %), each exact to its bin. The mean square of a
    correction's weights becomes their standard deviation and effective sample size, the latter as a share of the
    tokens. An extreme over no token at all is left out.
    """
    numbers = {name: float(value) for name, value in metrics.items() if value.dim() == 0}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value) or name not in EXTREMES}
    if WEIGHT_SQUARE in numbers:
        square, mean = numbers.pop(WEIGHT_SQUARE), numbers["rollout_corr/rollout_is_mean"]
        numbers["rollout_corr/rollout_is_std"] = math.sqrt(max(square - mean * mean, 0.0))
        numbers["rollout_corr/rollout_is_eff_sample_size"] = mean * mean / square if square > 0 else 0.0
    counts = metrics.get(HISTOGRAM)
    if counts is not None and counts.sum() > 0:
        numbers |= {name: quantile(counts, share) for name, share in QUANTILES.items()}
    return numbers


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
