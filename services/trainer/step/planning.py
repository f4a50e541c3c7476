"""The plan of a step: which rank trains which sequences in which micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import InvalidJob
from millrace.sequence_cost import SequenceCost
from services.trainer.step.balance import equal_partition, partition
from services.trainer.step.packing import pack, spread

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
    micro-batch with `lockstep`, where parameters are sharded over the ranks, and otherwise in total. The heaviest
    micro-batches come first. A micro-batch is empty only where there are fewer sequences than micro-batches; its rank
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
