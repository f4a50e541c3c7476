"""Histograms count every value once, in the bin that their declaration says."""

import math
import random

import pytest

from millrace.telemetry.metrics.catalogue import UndeclaredMetric
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.histograms import (
    BINS,
    IMPORTANCE_RATIOS,
    RATIOS,
    RESPONSE_LENGTHS,
    SCORES,
    STALENESS,
    Histogram,
    declared,
)


def in_bins(values: list[float], edges: tuple[float, ...]) -> tuple[int, ...]:
    """Counts value by value; values outside of the edges belong to the nearest bin."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[max([0, *(at for at in range(len(counts)) if edges[at] <= value)])] += 1
    return tuple(counts)


def test_bins_of_equal_width() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 3) for _ in range(500)]
    found = SCORES.of(values)
    assert found is not None and len(found.counts) == BINS and found.counts == in_bins(values, found.edges)
    assert found.edges[0] == min(values) and found.edges[-1] == pytest.approx(max(values))
    widths = {round(b - a, 9) for a, b in zip(found.edges, found.edges[1:], strict=False)}
    assert len(widths) == 1


@pytest.mark.parametrize("longest", [0, 3, 19, 20, 4096])
def test_bins_of_whole_numbers_have_the_same_number_of_them(longest: int) -> None:
    values = list(range(longest + 1))
    found = RESPONSE_LENGTHS.of(values)
    assert found is not None and len(found.counts) <= BINS and sum(found.counts) == len(values)
    assert len(set(found.counts[:-1])) <= 1 and found.counts[-1] <= found.counts[0]
    assert all(edge == int(edge) for edge in found.edges)
    assert STALENESS.of([0, 0, 1]) == Histogram((0.0, 1.0, 2.0), (2, 1))


def test_values_outside_of_fixed_edges_are_counted_in_the_nearest_bin() -> None:
    values = [0.0, 0.05, 0.7, 1.0, 1.0005, 1.3, 10.0, 5000.0]
    found = IMPORTANCE_RATIOS.of(values)
    assert found == Histogram(RATIOS, in_bins(values, RATIOS))
    assert found.counts[0] == 2 and found.counts[-1] == 2 and sum(found.counts) == len(values)


def test_equal_values_have_one_bin_and_no_values_have_no_histogram() -> None:
    assert SCORES.of([0.25] * 7) == Histogram((0.25, 0.25), (7,))
    assert SCORES.of([]) is None and SCORES.of([math.nan, math.inf]) is None
    assert SCORES.of([1.0, math.nan]) == Histogram((1.0, 1.0), (1,))


def test_a_histogram_that_nobody_declared_is_refused() -> None:
    made = Histogram((0.0, 1.0), (1,))
    assert declared({SCORES.key: made}, Owner.COORDINATOR) == {SCORES.key: made}
    with pytest.raises(UndeclaredMetric, match="not declared as a histogram of the trainer"):
        declared({SCORES.key: made}, Owner.TRAINER)
