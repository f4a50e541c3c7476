"""Karmarkar–Karp against its definition, exhaustive search and a plain rule."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.step.planning import equal_partition, partition

costs_lists = st.lists(st.floats(0, 1e6), max_size=30)


def sums_of(costs: list[float], parts: list[list[int]]) -> list[float]:
    return [sum(costs[index] for index in part) for part in parts]


def spread_of(costs: list[float], parts: list[list[int]]) -> float:
    return max(sums_of(costs, parts)) - min(sums_of(costs, parts))


def differenced(groups: list[list[float]]) -> list[float]:
    """The sums that the largest differencing method ends with, on tuples with all their zeros, sorted each time."""
    partials = [sorted(group, reverse=True) for group in groups]
    while len(partials) > 1:
        partials.sort(key=lambda sums: sums[0] - sums[-1], reverse=True)
        first, second, *rest = partials
        joined = [a + b for a, b in zip(first, reversed(second), strict=True)]
        partials = [*rest, sorted(joined, reverse=True)]
    return partials[0]


@given(costs_lists, st.integers(1, 5))
def test_every_item_is_in_one_part(costs, count):
    parts = partition(costs, count)
    assert len(parts) == count
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert spread_of(costs, parts) <= max(costs, default=0) + 1e-6


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_equal_parts_have_equal_counts(count, size, data):
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=count * size, max_size=count * size))
    parts = equal_partition(costs, count)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert [len(part) for part in parts] == [size] * count


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equals_the_method_by_its_definition(count):
    draw = random.Random(count)
    costs = [draw.lognormvariate(0.0, 1.0) for _ in range(8 * count)]
    single = [[cost] + [0.0] * (count - 1) for cost in costs]
    assert sorted(sums_of(costs, partition(costs, count))) == pytest.approx(sorted(differenced(single)))
    heaviest = sorted(costs, reverse=True)
    blocks = [heaviest[start : start + count] for start in range(0, len(costs), count)]
    assert sorted(sums_of(costs, equal_partition(costs, count))) == pytest.approx(sorted(differenced(blocks)))


@pytest.mark.parametrize("seed", range(5))
def test_two_parts_are_near_the_best_of_all(seed):
    draw = random.Random(seed)
    costs = [draw.uniform(1, 10) for _ in range(12)]
    total = sum(costs)
    subsets = (subset for size in range(13) for subset in combinations(costs, size))
    best = min(abs(2 * sum(subset) - total) for subset in subsets)
    assert spread_of(costs, partition(costs, 2)) < best + 0.01 * total


@pytest.mark.parametrize("count", [2, 4, 8])
def test_far_nearer_than_dealing_in_turns(count):
    draw = random.Random(count)
    costs = sorted((draw.lognormvariate(0.0, 0.5) for _ in range(16 * count)), reverse=True)
    rounds = [list(range(start, start + count)) for start in range(0, len(costs), count)]
    there_and_back = (turn if number % 2 else turn[::-1] for number, turn in enumerate(rounds))
    dealt = [list(part) for part in zip(*there_and_back, strict=True)]
    assert spread_of(costs, partition(costs, count)) < 0.01 * spread_of(costs, dealt)


def test_by_hand():
    # 8 − 7 = 1, 6 − 5 = 1, then 4 − 1 = 3, then 3 − 1 = 2: the textbook case ends 2 apart, where 0 was possible.
    assert sorted(sums_of([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2))) == [14, 16]
    # Blocks (9, 8), (5, 4), (2, 1) differ by 1 each: 9 + 4 against 8 + 5 is even, and the last block stays 1 apart.
    assert sorted(sums_of([9, 8, 5, 4, 2, 1], equal_partition([9, 8, 5, 4, 2, 1], 2))) == [14, 15]


def test_uneven_counts_are_refused():
    with pytest.raises(ValueError, match="5 items do not divide into 2"):
        equal_partition([1.0] * 5, 2)
