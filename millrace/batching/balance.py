"""Karmarkar–Karp: numbers into parts whose sums are nearly equal."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class _Part(NamedTuple):
    """Sorts heaviest first; equal sums by their first item, so that every run gives the same."""

    negative_sum: float
    first: int
    items: list[int]


_Partial = tuple[float, int, list[_Part]]
"""A partition of some of the items: its negated difference, its first item, which no other has, and its parts, heaviest
first, empty ones left out. The heap gives the one whose parts differ most.
"""


def partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """`count` lists of indices into `costs`, none of them negative, with nearly equal sums. Deterministic.

    The largest differencing method: of the partial partitions the two whose parts differ most are joined, the heaviest
    part of one with the lightest of the other, until one is left.
    """
    return _joined([[_Part(-costs[index], index, [index])] for index in range(len(costs))], count)


def equal_partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """As `partition`, but with as many items in each part. Raises ValueError if they do not divide evenly.

    Items are taken in blocks of `count` of similar cost, one for each part. So the k-th heaviest items of all parts are
    alike too; what a part with an outlier can be spared is limited to the differences within the other blocks.
    """
    if len(costs) % count:
        raise ValueError(f"{len(costs)} items do not divide into {count} parts of equal count.")
    items = sorted(_Part(-cost, index, [index]) for index, cost in enumerate(costs))
    return _joined([items[start : start + count] for start in range(0, len(items), count)], count)


def _joined(groups: list[list[_Part]], count: int) -> list[list[int]]:
    heap = [_partial(parts, count) for parts in groups]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        alone = count - len(second)  # so many parts of the first meet an empty one of the second
        parts = first[:alone] + [_both(*pair) for pair in zip(first[alone:], reversed(second), strict=False)]
        parts += second[: count - len(first)]
        heapq.heappush(heap, _partial(sorted(parts), count))
    items = [part.items for part in heap[0][2]] if heap else []
    return items + [[] for _ in range(count - len(items))]


def _both(one: _Part, other: _Part) -> _Part:
    return _Part(one.negative_sum + other.negative_sum, min(one.first, other.first), one.items + other.items)


def _partial(parts: list[_Part], count: int) -> _Partial:
    lightest = parts[-1].negative_sum if len(parts) == count else 0.0
    return parts[0].negative_sum - lightest, parts[0].first, parts
