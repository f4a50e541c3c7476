"""Which sender sends which piece to which target, and in which message and round.

One target at a time: what belongs to one fits into a processor's cache, all of a large model's does not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.weights.plans.boxes import Boxes, Ints, sums
from millrace.weights.plans.hosts import turns_for
from millrace.weights.plans.wanted_pieces import WantedPieces

UNEVEN = 2
"""A rank sends, and receives, at most this many times MESSAGE_BYTES in a round."""
LEAST = 32
"""What two ranks have for each other is cut into parts of at least 1/LEAST of a message."""
ATTEMPTS = 8
"""How often the number of rounds is raised until no round is too large."""
PHASES = 1 << 16
"""Steps into which `Flows.round_of` divides a round to spread the pairs of ranks over the rounds."""


@dataclass(frozen=True)
class Flows:
    """What one target gets from senders: N pieces from S different senders."""

    target: int
    span: slice
    """The rows of `WantedPieces.pieces` that it gets."""
    order: Ints
    """[N] the rows inside `span`, ordered by sender, then as in the manifest."""
    bytes: Ints
    """[N] size of each, in this order."""
    before: Ints
    """[N] bytes that the same sender sends to this target before each."""
    source: Ints
    """[S] the senders, ascending."""
    count: Ints
    """[S] pieces that each sends."""
    total: Ints
    """[S] bytes that each sends."""

    def round_of(self, rounds: int, least: int) -> Ints:
        """[N] the round of each piece. What two ranks exchange is spread evenly over the rounds; pairs with little to
        exchange use different rounds."""
        parts = np.clip(-(-self.total // least), 1, rounds)
        # Multiples of the golden ratio: the phases of neighbouring ranks are far from each other.
        phase = (self.source + self.target) * 40503 % PHASES
        number = (
            (2 * self.before + self.bytes)
            * np.repeat(parts, self.count)
            // np.repeat(np.maximum(1, 2 * self.total), self.count)
        )
        round_of: Ints = (
            (number * PHASES + np.repeat(phase, self.count)) * rounds // np.repeat(parts * PHASES, self.count)
        )
        return round_of


def flows_to(targets: Sequence[int], wanted: WantedPieces, hosts: Sequence[str]) -> list[Flows]:
    """The flows to each of `targets`. The senders of a holder set take turns in what a target wants from the set.
    `hosts`: the host of each rank."""
    turns_of, asked = turns_for(wanted, hosts, targets), set(targets)
    flows = []
    for span, alike in zip(wanted.span, wanted.targets, strict=True):
        of_set, size = wanted.holder_set[span], wanted.bytes[span]
        middle, total = _middles(of_set, size)
        for target in alike:
            if target in asked:
                turns = turns_of[hosts[target]]
                count = turns.count[of_set]
                turn = (middle * count // total + target) % count
                flows.append(_flows(target, span, size, turns.sender[turns.first[of_set] + turn]))
    return flows


def _middles(group: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Where the middle of each row lies in its group, in halves of bytes; and the bytes of its group, likewise."""
    order = stable_order(group)
    reach = np.cumsum(size[order])
    last = np.flatnonzero(np.diff(group[order], append=-1))
    count = np.diff(last, prepend=-1)
    begin = np.repeat(np.append(0, reach[last])[:-1], count)
    middle, total = np.empty_like(size), np.empty_like(size)
    middle[order] = 2 * (reach - begin) - size[order]
    total[order] = 2 * (np.repeat(reach[last], count) - begin)
    return middle, total


def _flows(target: int, span: slice, size: Ints, source: Ints) -> Flows:
    """The flows of pieces with these sizes from these sources."""
    order = stable_order(source)
    ordered, senders = size[order], source[order]
    reach = np.cumsum(ordered)
    last = np.flatnonzero(np.diff(senders, append=-1))
    count, total = np.diff(last, prepend=-1), np.diff(reach[last], prepend=0)
    before = reach - ordered - np.repeat(reach[last] - total, count)
    return Flows(target, span, order.astype(np.int32), ordered, before, senders[last], count, total)


@dataclass(frozen=True)
class _Dealt:
    """The contents that one target gets, C of them, by round and sender; and its N pieces in their order."""

    flows: Flows
    order: Ints
    """[N] the rows inside `flows.span`."""
    first: Ints
    """[C] the first piece of each content."""
    round: Ints
    source: Ints
    bytes: Ints

    @classmethod
    def of(cls, flows: Flows, rounds: int, least: int) -> "_Dealt":
        round_of = flows.round_of(rounds, least)
        order = stable_order(round_of)
        rounds_, source = round_of[order], np.repeat(flows.source, flows.count)[order]
        first = np.flatnonzero(np.append(True, (np.diff(rounds_) != 0) | (np.diff(source) != 0))[: len(order)])
        size = np.add.reduceat(flows.bytes[order], first) if len(first) else flows.bytes
        return cls(flows, flows.order[order], first, rounds_[first], source[first], size)

    @property
    def count(self) -> Ints:
        """[C] pieces of each content."""
        return np.diff(self.first, append=len(self.order))


@dataclass(frozen=True)
class Contents:
    """C contents, ordered by round, source and target, as columns."""

    round: Ints
    source: Ints
    target: Ints
    bytes: Ints
    _dealt: Sequence[_Dealt]
    _position: Ints
    """[C] where each content of `_dealt`, in order, is among all."""

    @classmethod
    def of(cls, dealt: Sequence[_Dealt], world: int) -> "Contents":
        round_ = _joined(each.round for each in dealt)
        source = _joined(each.source for each in dealt)
        target = _joined(np.full(len(each.first), each.flows.target) for each in dealt)
        size = _joined(each.bytes for each in dealt)
        order = np.argsort((round_ * world + source) * world + target, kind="stable")
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        return cls(round_[order], source[order], target[order], size[order], dealt, position)

    def pieces(self, wanted: WantedPieces) -> tuple[Boxes, Ints, Ints]:
        """The pieces of all contents, in order; [P] where each begins in its content, in bytes; [C + 1] the first piece
        of each content."""
        count = np.empty(len(self.bytes), np.int64)
        count[self._position] = _joined(each.count for each in self._dealt)
        first = np.append(0, np.cumsum(count))
        index, done = np.empty(int(first[-1]), np.int32), 0
        for each in self._dealt:
            begins = first[self._position[done : done + len(each.first)]]
            done += len(each.first)
            rows = np.repeat(begins - each.first, each.count) + np.arange(len(each.order))
            index[rows] = each.order + each.flows.span.start
        size = wanted.bytes[index]
        reach = np.cumsum(size) - size
        at = reach - np.repeat(reach[first[:-1]], np.diff(first))
        return Boxes.from_columns(wanted.pieces.columns.take(index, axis=0)), at, first


def heaviest_loads(flows: Sequence[Flows]) -> tuple[int, int]:
    """Bytes that the rank sends that sends most, and that the target gets that gets most."""
    sent = sums(_joined(each.source for each in flows), _joined(each.total for each in flows))
    return int(sent.max(initial=0)), max((int(each.total.sum()) for each in flows), default=0)


def deal(flows: Sequence[Flows], world: int, message_bytes: int) -> Contents:
    """Deals the pieces to rounds, and joins those of one round, source and target to contents."""
    rounds = max(1, -(-max(heaviest_loads(flows)) // message_bytes))
    for _ in range(ATTEMPTS):
        contents = Contents.of([_Dealt.of(each, rounds, max(1, message_bytes // LEAST)) for each in flows], world)
        loads = (sums(contents.round * world + end, contents.bytes) for end in (contents.source, contents.target))
        heaviest = max(int(load.max(initial=0)) for load in loads)
        if heaviest <= UNEVEN * message_bytes:
            break
        rounds = -(-rounds * heaviest // (UNEVEN * message_bytes))
    return contents


def stable_order(group: Ints) -> Ints:
    """The rows ordered by group, equal ones as they were. Numbers below 2^16 are sorted by radix, in linear time."""
    small = len(group) and int(group.max()) < 1 << 16
    return np.argsort(group.astype(np.uint16) if small else group, kind="stable")


def _joined(columns: Iterable[Ints]) -> Ints:
    return np.concatenate([*columns, np.zeros(0, np.int64)])
