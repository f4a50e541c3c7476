"""Aggregation is the same for any split into micro-batches and ranks, packed or padded."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.rl.registry.catalogue import AGGREGATIONS
from services.trainer.algorithms.aggregation import BatchTotals, aggregate

HORIZON = 10


def slow(mode: str, sequences: list[list[float]]) -> float:
    """Each mode in words, on lists of the values that count."""
    tokens = [value for sequence in sequences for value in sequence]
    present = [sequence for sequence in sequences if sequence]
    if not tokens:
        return 0.0
    match mode:
        case "token-mean":
            return math.fsum(tokens) / len(tokens)
        case "token-sum":
            return math.fsum(tokens)
        case "token-sum-norm":
            return math.fsum(tokens) / HORIZON
        case "seq-mean-token-sum":
            return math.fsum(map(math.fsum, present)) / len(present)
        case "seq-mean-token-mean":
            return math.fsum(math.fsum(sequence) / len(sequence) for sequence in present) / len(present)
        case "seq-mean-token-sum-norm":
            return math.fsum(math.fsum(sequence) / HORIZON for sequence in present) / len(present)
    raise AssertionError(mode)


def padded(sequences: list[list[float]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values_bt = torch.full((len(sequences), width), math.nan, dtype=torch.float64)
    for row, sequence in zip(values_bt, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.float64)
    return values_bt, ~values_bt.isnan()


floats = st.floats(-1e3, 1e3)
batches = st.lists(st.lists(floats, max_size=6), min_size=1, max_size=12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=60)
@given(sequences=batches, data=st.data())
def test_any_split_adds_up_to_the_batch(mode, sequences, data):
    homes = data.draw(st.lists(st.integers(0, 4), min_size=len(sequences), max_size=len(sequences)))
    micro_batches = [[s for s, home in zip(sequences, homes, strict=True) if home == part] for part in range(5)]
    parts = [padded(part, data.draw(st.integers(6, 9))) for part in micro_batches if part]
    totals = sum((BatchTotals.of(mask_bt) for _, mask_bt in parts), BatchTotals(0, 0))
    shares = [aggregate(mode, values, mask, totals=totals, horizon=HORIZON) for values, mask in parts]
    assert float(sum(shares)) == pytest.approx(slow(mode, sequences), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 4),
        ("token-sum", 12.0),
        ("token-sum-norm", 1.2),
        ("seq-mean-token-sum", (6 + 6) / 2),
        ("seq-mean-token-mean", (2 + 6) / 2),
        ("seq-mean-token-sum-norm", 0.6),
    ],
)
def test_by_hand(mode, expected):
    values_bt = torch.tensor([[1.0, 2, 3, 50], [6.0, 7, 8, 9], [4.0, 4, 4, 4]], dtype=torch.float64)
    mask_bt = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    value = aggregate(mode, values_bt, mask_bt, horizon=HORIZON)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradients_add_up_too(mode):
    values_bt = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    mask_bt = torch.arange(5) < torch.tensor([5, 1, 0, 3, 2, 4])[:, None]
    (whole,) = torch.autograd.grad(aggregate(mode, values_bt, mask_bt, horizon=HORIZON), values_bt)
    totals = BatchTotals.of(mask_bt)
    for rows in ([0, 2], [1], [3, 4, 5]):
        aggregate(mode, values_bt[rows], mask_bt[rows], totals=totals, horizon=HORIZON).backward()
    torch.testing.assert_close(values_bt.grad, whole)


def test_nothing_to_count_is_zero():
    assert aggregate("token-mean", torch.full((2, 3), math.nan), torch.zeros(2, 3)).item() == 0


def test_refusals():
    values_bt = torch.ones(2, 3)
    with pytest.raises(ValueError, match="choose one of token-mean"):
        aggregate("mean", values_bt, values_bt)
    with pytest.raises(ValueError, match="needs a horizon"):
        aggregate("seq-mean-token-sum-norm", values_bt, values_bt)
    with pytest.raises(ValueError, match=r"\(2, 3\) but mask_bt is \(2, 4\)"):
        aggregate("token-mean", values_bt, torch.ones(2, 4))
