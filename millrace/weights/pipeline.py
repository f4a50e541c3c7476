"""Pack → send and receive → unpack, round after round, with several slots in flight.

A sender packs round n + 1 while round n travels; a receiver unpacks round n − 1 meanwhile. Every slot carries the
number of the round that it was claimed for: whoever reads it for another finds out.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from millrace.errors import PublicationFailed
from millrace.weights.channels.channel import Channel, Flight, Parcel
from millrace.weights.checksum import checksum
from millrace.weights.memory import Lane, Memory, Pair, differing, pack, pairs, unpack
from millrace.weights.sharded import ShardedPlan

SLOTS = 3
"""A message that is passed on lies one round longer, so fewer would not do."""


@dataclass
class Times:
    """Seconds of this rank's thread: packing and converting, in the channel, checksums, unpacking."""

    pack_s: float = 0.0
    wire_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0


class Ring:
    """Slots of equal size, reused in turn."""

    def __init__(self, slots: int, size: int, device: torch.device) -> None:
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._claimed = [-1] * slots

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def slot(self, step: int) -> torch.Tensor:
        """The memory of a step, claimed or not."""
        return self._memory[step % len(self._memory)]

    def restart(self) -> None:
        self._claimed = [-1] * len(self._memory)

    def claim(self, step: int) -> None:
        """For writing. Raises PublicationFailed where a later step has it."""
        index = step % len(self._memory)
        if self._claimed[index] not in (-1, step - len(self._memory)):
            raise PublicationFailed(f"slot {index} was claimed for step {self._claimed[index]} before {step}.")
        self._claimed[index] = step

    def check(self, step: int) -> None:
        """Before reading. Raises PublicationFailed where the slot holds another step's bytes."""
        if (held := self._claimed[step % len(self._memory)]) != step:
            raise PublicationFailed(
                f"a slot holds step {held} where {step} was to be read.", "report it with the plan."
            )


class Sending:
    """A trainer rank's part of a plan; made once for a plan, run for each version."""

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, slots: int = SLOTS) -> None:
        self._plan = plan
        self._steps = plan.steps(rank)
        self._lane = Lane(memory.device)
        outgoing = [list(dict.fromkeys(content for content, _ in step.sends)) for step in self._steps]
        offsets = [_offsets(plan, contents) for contents in outgoing]
        size = max((int(plan.sizes[contents].sum()) for contents in outgoing), default=0)
        self._ring = Ring(min(slots, max(1, len(self._steps))), size, memory.device)
        self._moves: list[list[Pair]] = []
        self._messages: list[dict[int, torch.Tensor]] = []
        for number, at in enumerate(offsets):
            slot = self._ring.slot(number)
            messages = {content: _part(slot, first, plan, content) for content, first in at.items()}
            self._messages.append(messages)
            self._moves.append([p for c, m in messages.items() for p in pairs(plan, c, m, memory, every=False)])
        self.bytes = sum(int(plan.sizes[content]) for step in self._steps for content, _ in step.sends)
        self.slot_bytes = self._ring.bytes

    def run(self, channel: Channel) -> tuple[Mapping[int, int], Times]:
        """Sends everything; the checksum of each content that this rank packed, taken from the packed bytes."""
        flights: list[Flight] = []
        sums: dict[int, int] = {}
        times = Times()
        self._ring.restart()
        self._lane.follow_current()
        for number, step in enumerate(self._steps):
            began = time.perf_counter()
            if number >= len(self._ring):
                flights[number - len(self._ring)].land(self._lane.stream)
            landed = time.perf_counter()
            self._ring.claim(number)
            with torch.no_grad(), self._lane:
                pack(self._moves[number])
                packed = time.perf_counter()
                for content, message in self._messages[number].items():
                    sums[content] = checksum(message)
            summed = time.perf_counter()
            self._ring.check(number)
            parcels = [Parcel(content, peer, self._messages[number][content]) for content, peer in step.sends]
            flights.append(channel.exchange(parcels, (), self._lane.stream))
            times.pack_s += packed - landed
            times.verify_s += summed - packed
            times.wire_s += landed - began + time.perf_counter() - summed
        began = time.perf_counter()
        for flight in flights[-len(self._ring) :]:
            flight.land(self._lane.stream)
        self._lane.join()
        times.wire_s += time.perf_counter() - began
        return sums, times


@dataclass
class Reception:
    """What arrived: the checksum of each content, from its bytes as they came."""

    sums: dict[int, int] = field(default_factory=dict)
    times: Times = field(default_factory=Times)


class Receiving:
    """A replica's worker's part of a plan; made once for a plan, run for each version.

    Staged, everything is received into memory of its own, beside generation, and `apply` puts it in place; otherwise
    each round is put in place as it arrives, through a few slots.
    """

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, *, staged: bool, slots: int = SLOTS) -> None:
        self._plan = plan
        self._rank = rank
        self._staged = staged
        self._memory = memory
        self._steps = plan.steps(rank)
        self._lane = Lane(memory.device)
        incoming = [[content for content, _ in step.receives] for step in self._steps]
        self._messages: dict[int, torch.Tensor] = {}
        self._step_of = {content: number for number, contents in enumerate(incoming) for content in contents}
        if staged:
            self._ring = Ring(1, int(sum(plan.sizes[contents].sum() for contents in incoming)), memory.device)
            every = [content for contents in incoming for content in contents]
            self._place({0: every})
        else:
            size = max((int(plan.sizes[contents].sum()) for contents in incoming), default=0)
            self._ring = Ring(min(slots, max(1, len(self._steps))), size, memory.device)
            self._place(dict(enumerate(incoming)))
        self._moves = {
            content: list(pairs(plan, content, message, memory, every=True))
            for content, message in self._messages.items()
        }
        self.bytes = sum(int(plan.sizes[content]) for content in self._messages)
        self.slot_bytes = self._ring.bytes

    def _place(self, by_step: Mapping[int, Sequence[int]]) -> None:
        for number, contents in by_step.items():
            for content, first in _offsets(self._plan, contents).items():
                self._messages[content] = _part(self._ring.slot(number), first, self._plan, content)

    def run(self, channel: Channel) -> Reception:
        """Receives everything, and passes on what others are to have from here."""
        flights: list[Flight | None] = []
        got = Reception()
        self._ring.restart()
        self._lane.follow_current()
        for number, step in enumerate(self._steps):
            if any(self._step_of[content] == number - 1 for content, _ in step.sends):
                self._finish(number - 1, flights, got)
            began = time.perf_counter()
            if not self._staged:
                self._ring.claim(number)
                for content, _ in step.sends:
                    self._ring.check(self._step_of[content])
            sends = [Parcel(content, peer, self._messages[content]) for content, peer in step.sends]
            receives = [Parcel(content, peer, self._messages[content]) for content, peer in step.receives]
            flights.append(channel.exchange(sends, receives, self._lane.stream))
            got.times.wire_s += time.perf_counter() - began
            if number:
                self._finish(number - 1, flights, got)
        if self._steps:
            self._finish(len(self._steps) - 1, flights, got)
        self._lane.join()
        return got

    def _finish(self, number: int, flights: list[Flight | None], got: Reception) -> None:
        """Lands a step; its bytes are summed and, unless staged, put in place. Done once for each step."""
        flight = flights[number]
        if flight is None:
            return
        began = time.perf_counter()
        flight.land(self._lane.stream)
        flights[number] = None
        landed = time.perf_counter()
        got.times.wire_s += landed - began
        if not self._staged:
            self._ring.check(number)
        with torch.no_grad(), self._lane:
            for content, _ in self._steps[number].receives:
                got.sums[content] = checksum(self._messages[content])
            summed = time.perf_counter()
            got.times.verify_s += summed - landed
            if not self._staged:
                self._put(content for content, _ in self._steps[number].receives)
                got.times.apply_s += time.perf_counter() - summed

    def apply(self) -> tuple[float, float]:
        """Puts what was staged in place and compares it there bit for bit; seconds of both. Raises PublicationFailed
        where memory does not hold what was written."""
        began = time.perf_counter()
        self._lane.follow_current()
        with torch.no_grad(), self._lane:
            for moves in self._moves.values():
                unpack(moves)
            self._lane.join()
            written = time.perf_counter()
            for content in self._moves:
                self._compare(content)
        self._lane.join()
        return written - began, time.perf_counter() - written

    def _put(self, contents: Iterable[int]) -> None:
        for content in contents:
            unpack(self._moves[content])
            self._compare(content)

    def _compare(self, content: int) -> None:
        if wrong := differing(self._moves[content]):
            what = f"{len(wrong)} pieces of {self.names(content)} differ in the engine from what was received."
            raise PublicationFailed(what, "look at the memory of the worker's host and device.")

    def names(self, content: int) -> str:
        return tensors_in(self._plan, content, self._memory)


def tensors_in(plan: ShardedPlan, content: int, memory: Memory) -> str:
    """The names of the tensors that a content has pieces of, shortened."""
    found = np.unique(plan.pieces.tensor[plan.pieces_in(content)])
    names = [memory.manifest.tensors[i].name for i in found[:3]]
    return ", ".join(names) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _offsets(plan: ShardedPlan, contents: Sequence[int]) -> dict[int, int]:
    ends = np.cumsum([0, *(plan.sizes[content] for content in contents)])
    return {content: int(first) for content, first in zip(contents, ends, strict=False)}


def _part(slot: torch.Tensor, first: int, plan: ShardedPlan, content: int) -> torch.Tensor:
    return slot[first : first + int(plan.sizes[content])]
