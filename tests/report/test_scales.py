"""Axes and points of the charts, for any numbers."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millrace.report.scales import smoothed, thinned, ticks, written

FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.lists(FINITE, min_size=1, max_size=60)


@given(FINITE, FINITE)
def test_ticks_are_few_ordered_and_in_the_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high)
    assert 1 <= len(found) <= 12 and all(a <= b for a, b in pairwise(found))
    slack = 1e-6 * max(abs(low), abs(high), high / 2 - low / 2)
    assert all(math.isfinite(at) and low - slack <= at <= high + slack for at in found)


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    assert ticks(3, 97) == [50.0] or ticks(3, 97) == [20.0, 40.0, 60.0, 80.0]


@given(VALUES, st.integers(4, 20))
def test_thinned_points_keep_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 4) and kept == sorted(set(kept))
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert min(v for _, v in kept) == min(values) and max(v for _, v in kept) == max(values)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_the_mean_over_neighbours_is_that_of_a_slow_computation(values: list[int], window: int) -> None:
    points = [(float(step), float(value)) for step, value in enumerate(values)]
    for at, (_, mean) in enumerate(smoothed(points, window)):
        reach = min(window // 2, at, len(values) - 1 - at)
        around = values[at - reach : at + reach + 1]
        assert math.isclose(mean, sum(around) / len(around), abs_tol=1e-9)


def test_numbers_are_short() -> None:
    assert [written(n) for n in (0.0, 0.01234567, 12345.0, 1234.56, 1e-6, 2.5e9, math.inf)] == [
        "0", "0.01235", "12,345", "1,234.6", "1e-06", "2.5e+09", "inf",
    ]  # fmt: skip
