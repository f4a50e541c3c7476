"""The plan of a step: which rank trains which sequences in which micro-batch, and how well the ranks are used."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.errors import InvalidJob
from millrace.sequence_cost import SequenceCost

Plan = list[list[list[int]]]
"""`plan[rank][i]` has the indices, ascending, of the sequences in the i-th micro-batch of the rank."""
Loads = list[list[float]]
"""`loads[rank][i]` is the cost of that micro-batch."""


def plan_microbatches(
    lengths: Sequence[int],
    *,
    ranks: int,
    token_budget: int,
    cost: SequenceCost | None = None,
    lockstep: bool = True,
) -> Plan:
    """Plans a step. Deterministic.

    Each sequence is in exactly one micro-batch, no micro-batch has more than `token_budget` tokens, and all ranks have
    the same number of micro-batches, as few as this method finds. The ranks' costs are about equal: for each i-th
    micro-batch with `lockstep`, if parameters are sharded over the ranks, and otherwise in total. The heaviest
    micro-batches come first. A micro-batch is empty only if there are fewer sequences than micro-batches; its rank
    then runs a batch of padding, because all ranks have to take part in the collectives.

    Raises InvalidJob if a sequence has more tokens than the budget, ValueError for a length or rank count below 1.
    """
    if ranks < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"{ranks} ranks and lengths {min(lengths, default=1)} and more: both have to be at least 1.")
    _check_longest(lengths, token_budget)
    costs = [(cost or SequenceCost()).of(length) for length in lengths]
    step = _Step(lengths, costs, ranks, token_budget)
    fewest = max(1, -(-sum(lengths) // (ranks * token_budget)))
    most = max(1, -(-len(pack(lengths, token_budget)) // ranks))
    for rounds in range(fewest, most + 1):
        plans = [plan for plan in (step.ranks_first(rounds), step.microbatches_first(rounds)) if plan is not None]
        if plans:
            break
    duration = _duration_in_lockstep if lockstep else _duration_without_lockstep
    return min(plans, key=lambda plan: duration(step.loads(plan)))


def repack(plan: Plan, lengths: Sequence[int], *, token_budget: int, cost: SequenceCost) -> Plan:
    """The plan's sequences on the same ranks, in micro-batches of another token budget: as few as this method finds,
    the same number on every rank. Deterministic. Raises InvalidJob as `plan_microbatches`."""
    shares = [sorted(index for members in batches for index in members) for batches in plan]
    _check_longest([lengths[index] for share in shares for index in share], token_budget)
    step = _Step(lengths, [cost.of(length) for length in lengths], len(plan), token_budget)
    tokens = max(sum(lengths[index] for index in share) for share in shares)
    most = max(1, *(len(pack([lengths[index] for index in share], token_budget)) for share in shares))
    plans = (step.of_shares(shares, rounds) for rounds in range(max(1, -(-tokens // token_budget)), most + 1))
    return next(plan for plan in plans if plan is not None)


def _check_longest(lengths: Sequence[int], token_budget: int) -> None:
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise InvalidJob(
            f"trainer.token_budget = {token_budget}: sequence {list(lengths).index(longest)} has {longest} tokens.",
            f"Raise the token budget to at least {longest}, or allow shorter prompts or responses.",
        )


def _duration_in_lockstep(loads: Loads) -> float:
    return float(sum(map(max, zip(*loads, strict=True))))


def _duration_without_lockstep(loads: Loads) -> float:
    return max(map(sum, loads))


@dataclass(frozen=True)
class _Step:
    """Two ways to plan a step with a given number of micro-batches for each rank. A way may find no plan: None."""

    lengths: Sequence[int]
    costs: Sequence[float]
    ranks: int
    token_budget: int

    def ranks_first(self, rounds: int) -> Plan | None:
        """Assigns sequences to ranks by cost, then each rank's to micro-batches: the ranks' costs differ least."""
        shares = partition(self.costs, self.ranks)
        if len(self.lengths) >= rounds * self.ranks and min(map(len, shares)) < rounds:
            return None  # a rank would run padding while another has sequences to spare
        return self.of_shares(shares, rounds)

    def of_shares(self, shares: Sequence[Sequence[int]], rounds: int) -> Plan | None:
        """The ranks' sequences in `rounds` micro-batches each."""
        plan = []
        for members in shares:
            bins = self._bins(members, rounds)
            if bins is None:
                return None
            plan.append(self._heaviest_first(bins))
        return plan

    def microbatches_first(self, rounds: int) -> Plan | None:
        """Assigns sequences to micro-batches, then these to ranks: finds room where the budget is nearly used up."""
        bins = self._bins(range(len(self.lengths)), rounds * self.ranks)
        if bins is None:
            return None
        return [
            self._heaviest_first([bins[home] for home in homes])
            for homes in equal_partition([self._cost(members) for members in bins], self.ranks)
        ]

    def loads(self, plan: Plan) -> Loads:
        return [[self._cost(members) for members in bins] for bins in plan]

    def _bins(self, members: Sequence[int], count: int) -> list[list[int]] | None:
        """`count` micro-batches of these sequences: of equal cost, else of equal length, else as full as possible."""
        lengths = [self.lengths[index] for index in members]
        for loads in ([self.costs[index] for index in members], [float(length) for length in lengths]):
            bins = spread(lengths, loads, self.token_budget, count)
            if bins is not None:
                return [[members[at] for at in positions] for positions in bins]
        bins = pack(lengths, self.token_budget)
        if len(bins) > count:
            return None
        return [[members[at] for at in positions] for positions in _filled(bins, count)]

    def _heaviest_first(self, bins: list[list[int]]) -> list[list[int]]:
        bins = [sorted(members) for members in bins]
        return sorted(bins, key=lambda members: (-self._cost(members), members))

    def _cost(self, members: list[int]) -> float:
        return sum(self.costs[index] for index in members)


def _filled(bins: list[list[int]], count: int) -> list[list[int]]:
    """Adds micro-batches until there are `count`; none is empty while another has two sequences."""
    bins = [list(members) for members in bins] + [[] for _ in range(count - len(bins))]
    for members in bins:
        fullest = max(bins, key=len)
        if not members and len(fullest) > 1:
            members.append(fullest.pop())
    return bins


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Divides sequences into few micro-batches, lists of sequence indices.

    Longest first, each sequence goes into the micro-batch in which it leaves the least room.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, micro-batch), ascending
    for index in longest_first(lengths):
        length = lengths[index]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, home = token_budget, len(bins)
            bins.append([])
        else:
            room, home = rooms.pop(at)
        bins[home].append(index)
        insort(rooms, (room - length, home))
    return bins


def spread(lengths: Sequence[int], loads: Sequence[float], token_budget: int, count: int) -> list[list[int]] | None:
    """Divides sequences into exactly `count` micro-batches of about equal load; None if some sequence has no room.

    Longest first, each sequence goes into the lightest micro-batch that has room. `loads` has a load for each sequence.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0.0, home, token_budget) for home in range(count)]  # lightest first: (load, micro-batch, room)
    short_bins: list[tuple[int, float, int]] = []  # micro-batches too full for the current length, most room first
    for index in longest_first(lengths):
        length = lengths[index]
        while short_bins and -short_bins[0][0] >= length:
            room, load, home = heapq.heappop(short_bins)
            heapq.heappush(open_bins, (load, home, -room))
        while open_bins and open_bins[0][2] < length:
            load, home, room = heapq.heappop(open_bins)
            heapq.heappush(short_bins, (-room, load, home))
        if not open_bins:
            return None
        load, home, room = open_bins[0]
        heapq.heapreplace(open_bins, (load + loads[index], home, room - length))
        bins[home].append(index)
    return bins


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices of the sequences by descending length; equal lengths in their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


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


@dataclass(frozen=True)
class PlanReport:
    """Figures of a plan. Except for `microbatches`, all are 0 for a plan without waste and with equal ranks."""

    microbatches: int
    """Number of micro-batches of each rank."""
    waste: float
    """Part of the token budget of all micro-batches that holds no token, from 0 to 1."""
    imbalance: float
    """Cost of the costliest rank over the mean cost of the ranks, minus 1."""
    lockstep_imbalance: float
    """Sum over the micro-batches of the costliest rank's cost, over the mean cost of the ranks, minus 1: the imbalance
    if all ranks wait for each other in each micro-batch."""


def report(plan: Plan, lengths: Sequence[int], *, token_budget: int, cost: SequenceCost) -> PlanReport:
    """The figures of `plan`. A rank with fewer micro-batches than others is counted as waiting for them."""
    count = max(map(len, plan))
    capacity = len(plan) * token_budget
    loads = [[cost.total(lengths[index] for index in members) for members in bins] for bins in plan]
    padded = [row + [0.0] * (count - len(row)) for row in loads]
    mean = sum(map(sum, loads)) / len(plan)
    return PlanReport(
        microbatches=count,
        waste=1 - sum(lengths) / (count * capacity),
        imbalance=max(map(sum, loads)) / mean - 1,
        lockstep_imbalance=sum(map(max, zip(*padded, strict=True))) / mean - 1,
    )
