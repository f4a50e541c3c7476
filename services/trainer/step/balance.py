"""Division of numbers into parts whose sums are nearly equal, by the method of Karmarkar and Karp."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class _Part(NamedTuple):
    """Some items and their sum. Parts sort heaviest first and equal sums by first item, so results are repeatable."""

    negative_sum: float
    first: int
    items: list[int]


_Partial = tuple[float, int, list[_Part]]
"""A partition of some of the items: the negated difference of its heaviest and lightest part, its first item, which
is unique, and its nonempty parts, heaviest first. The heap yields the partition whose parts differ most.
"""


def partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """Divides `costs`, which must not be negative, into `count` lists of indices with nearly equal sums. Deterministic.

    This is the largest differencing method: the two partial partitions whose parts differ most are merged, the heaviest
    part of one with the lightest part of the other, until one partition is left.
    """
    return _joined([[_Part(-costs[index], index, [index])] for index in range(len(costs))], count)


def equal_partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """Like `partition`, but with the same number of items in each part. Raises ValueError if that is impossible.

    Items are taken in blocks of `count` items of similar cost, one for each part. So the k-th heaviest items of all
    parts are similar too, and a part with an outlier can be relieved only by the differences within the other blocks.
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
        unmatched = count - len(second)  # the parts of `first` that meet an empty part of `second`
        parts = first[:unmatched] + [_merged(*pair) for pair in zip(first[unmatched:], reversed(second), strict=False)]
        parts += second[: count - len(first)]
        heapq.heappush(heap, _partial(sorted(parts), count))
    items = [part.items for part in heap[0][2]] if heap else []
    return items + [[] for _ in range(count - len(items))]


def _merged(one: _Part, other: _Part) -> _Part:
    return _Part(one.negative_sum + other.negative_sum, min(one.first, other.first), one.items + other.items)


def _partial(parts: list[_Part], count: int) -> _Partial:
    lightest = parts[-1].negative_sum if len(parts) == count else 0.0
    return parts[0].negative_sum - lightest, parts[0].first, parts
