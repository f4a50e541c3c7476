"""Aggregation of one value for each token to one number, exact over micro-batches and data-parallel ranks.

The mean of the micro-batches' means is not the mean of the batch. So each aggregation divides by counts of the *whole*
batch, `BatchTotals`. The sum of `aggregate(..., totals=totals)` over all micro-batches of all ranks is the batch's
value, and the sum of the gradients is the batch's gradient. A backend that averages gradients over its ranks has to
multiply by the number of ranks.
"""

from dataclasses import dataclass
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
