"""Pack → send and receive → unpack, round after round, with several slots in flight.

A sender packs round n + 1 while round n travels; a receiver unpacks round n − 1 meanwhile. Every slot carries the
number of the round that it was claimed for: whoever reads it for another finds out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from millrace.errors import PublicationFailed
from millrace.weights.plans.memory import DeviceStream, Memory, PieceInMessage, pieces_in_messages
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage, PendingExchange
from millrace.weights.transfer.round_operations import (
    RoundOperations,
    differing_counts,
    message_checksums,
    round_operations,
)

SLOTS = 3
"""A message that is passed on lies one round longer, so fewer would not do."""

_MEMORY = "look at the memory of the worker's host and device."


@dataclass(frozen=True)
class TransferTimes:
    """Seconds: packing and converting, checksums, unpacking and comparing; and of the whole run."""

    pack_s: float
    verify_s: float
    apply_s: float
    whole_s: float

    @property
    def wire_s(self) -> float:
        """What is left: in the channel. On a GPU the others are done meanwhile, and most of them take nothing off."""
        return max(0.0, self.whole_s - self.pack_s - self.verify_s - self.apply_s)


class Spans:
    """Adds up how long a lane works on something, from `with` to `with`."""

    def __init__(self, lane: DeviceStream) -> None:
        self._lane = lane
        self._spent = 0.0
        self._marks: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._began = self._mark()

    def __exit__(self, *error: Any) -> None:
        if self._lane.stream is None:
            self._spent += time.perf_counter() - self._began
        else:
            self._marks.append((self._began, self._mark()))

    def _mark(self) -> Any:
        if self._lane.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._lane.stream)
        return event

    def seconds(self) -> float:
        """Once the lane has done it."""
        return self._spent + sum(began.elapsed_time(ended) for began, ended in self._marks) / 1e3


class SlotRing:
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


class SendPipeline:
    """A trainer rank's part of a plan; made once for a plan, run for each version."""

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, slots: int = SLOTS) -> None:
        self._steps = plan.steps(rank)
        self._lane = DeviceStream(memory.device)
        outgoing = [list(dict.fromkeys(content for content, _ in step.sends)) for step in self._steps]
        size = max((int(plan.sizes[contents].sum()) for contents in outgoing), default=0)
        self._ring = SlotRing(min(slots, max(1, len(self._steps))), size, memory.device)
        self._messages: list[dict[int, torch.Tensor]] = []
        for number, contents in enumerate(outgoing):
            self._messages.append(_messages(plan, contents, self._ring.slot(number)))
        self._batches, _ = _batches(plan, self._messages, memory, every=False)
        self.bytes = sum(int(plan.sizes[content]) for step in self._steps for content, _ in step.sends)
        self.slot_bytes = self._ring.bytes
        self.device = memory.device

    def run(self, channel: Channel) -> tuple[Mapping[int, int], TransferTimes]:
        """Sends everything; the checksum of each content that this rank packed, taken from the packed bytes."""
        exchanges: list[PendingExchange] = []
        packing, summing = Spans(self._lane), Spans(self._lane)
        began = time.perf_counter()
        self._ring.restart()
        self._lane.follow_current()
        for number, step in enumerate(self._steps):
            if number >= len(self._ring):
                exchanges[number - len(self._ring)].wait()
            self._ring.claim(number)
            with torch.no_grad(), self._lane:
                with packing:
                    self._batches[number].pack()
                with summing:
                    self._batches[number].sum()
            self._ring.check(number)
            messages = [ChannelMessage(content, peer, self._messages[number][content]) for content, peer in step.sends]
            exchanges.append(channel.exchange(messages, (), self._lane.stream))
        for exchange in exchanges[-len(self._ring) :]:
            exchange.wait()
        self._lane.join(channel.check)
        with self._lane:
            found = message_checksums(self._batches)
        return found, TransferTimes(packing.seconds(), summing.seconds(), 0.0, time.perf_counter() - began)


@dataclass(frozen=True)
class ReceivedMessages:
    """What arrived: the checksum of each content, from its bytes as they came."""

    sums: Mapping[int, int]
    times: TransferTimes


class ReceivePipeline:
    """A replica's worker's part of a plan; made once for a plan, run for each version.

    Staged, everything is received into memory of its own, beside generation, and `apply` puts it in place; otherwise
    each round is put in place as it arrives, through a few slots.
    """

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, *, staged: bool, slots: int = SLOTS) -> None:
        self._staged = staged
        self._steps = plan.steps(rank)
        self._lane = DeviceStream(memory.device)
        incoming = [[content for content, _ in step.receives] for step in self._steps]
        self._step_of = {content: number for number, contents in enumerate(incoming) for content in contents}
        if staged:
            self._ring = SlotRing(1, int(plan.sizes[plan.contents_of(rank)].sum()), memory.device)
            whole = _messages(plan, [content for contents in incoming for content in contents], self._ring.slot(0))
            by_step = [{content: whole[content] for content in contents} for contents in incoming]
        else:
            size = max((int(plan.sizes[contents].sum()) for contents in incoming), default=0)
            self._ring = SlotRing(min(slots, max(1, len(self._steps))), size, memory.device)
            by_step = [_messages(plan, contents, self._ring.slot(n)) for n, contents in enumerate(incoming)]
        self._messages = {content: message for messages in by_step for content, message in messages.items()}
        self._batches, pairs = _batches(plan, by_step, memory, every=True)
        # What is staged is put in place at once: a launch for each round would be most of the pause.
        self._placing = round_operations(pairs, {}, memory.device) if staged else None
        self._names = [_names(plan, contents, memory) for contents in incoming]
        self.bytes = sum(int(plan.sizes[content]) for content in self._messages)
        self.slot_bytes = self._ring.bytes
        self.device = memory.device
        self._lane.follow_current()

    def run(self, channel: Channel) -> ReceivedMessages:
        """Receives everything, and passes on what others are to have from here. Raises PublicationFailed where that
        fails, or where memory does not hold what was put in place."""
        landing = _Landing(Spans(self._lane), Spans(self._lane))
        began = time.perf_counter()
        self._ring.restart()
        if not self._staged:  # the engine has done with its parameters; memory apart it never touches
            self._lane.follow_current()
        for number, step in enumerate(self._steps):
            if any(self._step_of[content] == number - 1 for content, _ in step.sends):
                self._finish(number - 1, landing)
            if not self._staged:
                if number >= len(self._ring):
                    landing.exchanges[number - len(self._ring)].wait()
                self._ring.claim(number)
                for content, _ in step.sends:
                    self._ring.check(self._step_of[content])
            sends = [ChannelMessage(content, peer, self._messages[content]) for content, peer in step.sends]
            receives = [ChannelMessage(content, peer, self._messages[content]) for content, peer in step.receives]
            landing.exchanges.append(channel.exchange(sends, receives, self._lane.stream))
            self._finish(number - 1, landing)
        self._finish(len(self._steps) - 1, landing)
        for exchange in landing.exchanges:
            exchange.wait()
        if self._placing is not None:
            with self._lane:
                self._placing.note()
        self._lane.join(channel.check)
        with self._lane:
            found = message_checksums(self._batches)
        self._raise_differing()
        seconds = time.perf_counter() - began
        return ReceivedMessages(
            found, TransferTimes(0.0, landing.summing.seconds(), landing.putting.seconds(), seconds)
        )

    def _finish(self, number: int, landing: "_Landing") -> None:
        """Lands a step; its bytes are summed and, unless staged, put in place. Done once for each step."""
        if number < landing.finished:
            return
        landing.exchanges[number].wait_received(self._lane.stream)
        landing.finished = number + 1
        if not self._staged:
            self._ring.check(number)
        with torch.no_grad(), self._lane:
            with landing.summing:
                self._batches[number].sum()
            if not self._staged:
                with landing.putting:
                    self._batches[number].unpack()
                    self._batches[number].compare()

    def apply(self) -> tuple[float, float]:
        """Puts what was staged in place and checks it there: on a CPU bit for bit, on a GPU by checksums; seconds of
        both. Raises PublicationFailed where memory does not hold what was received."""
        assert self._placing is not None, "only what was staged is to be put in place"
        began = time.perf_counter()
        self._lane.follow_current()
        with torch.no_grad(), self._lane:
            self._placing.unpack()
        self._lane.join()
        written = time.perf_counter()
        with torch.no_grad(), self._lane:
            self._placing.check()
            (wrong,) = differing_counts([self._placing])
        if wrong:
            with torch.no_grad(), self._lane:
                for done in self._batches:  # each round knows its tensors
                    done.compare()
            self._raise_differing()
            raise PublicationFailed("the engine holds other bytes than those that were received.", _MEMORY)
        return written - began, time.perf_counter() - written

    def _raise_differing(self) -> None:
        with self._lane:
            found = differing_counts(self._batches)
        if wrong := [names for count, names in zip(found, self._names, strict=True) if count]:
            what = f"{wrong[0]} differ in the engine from what was received, {len(wrong)} rounds in all."
            raise PublicationFailed(what, _MEMORY)


@dataclass
class _Landing:
    """How far one run has come."""

    summing: Spans
    putting: Spans
    exchanges: list[PendingExchange] = field(default_factory=list)
    finished: int = 0


def _batches(
    plan: ShardedPlan, by_step: Sequence[Mapping[int, torch.Tensor]], memory: Memory, *, every: bool
) -> tuple[list[RoundOperations], list[PieceInMessage]]:
    """One a step, and what all of them move."""
    moves = pieces_in_messages(plan, {c: m for messages in by_step for c, m in messages.items()}, memory, every=every)
    pairs = [[pair for content in messages for pair in moves[content]] for messages in by_step]
    made = [
        round_operations(of_step, messages, memory.device) for of_step, messages in zip(pairs, by_step, strict=True)
    ]
    return made, [pair for of_step in pairs for pair in of_step]


def _names(plan: ShardedPlan, contents: Sequence[int], memory: Memory) -> str:
    """The names of the tensors that a round has pieces of, shortened."""
    found = sorted({int(n) for content in contents for n in plan.pieces.tensor[plan.pieces_in(content)][:50]})
    names = [memory.manifest.tensors[i].name for i in found[:3]]
    return ", ".join(names) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _messages(plan: ShardedPlan, contents: Sequence[int], slot: torch.Tensor) -> dict[int, torch.Tensor]:
    """Where in the slot each content is."""
    ends = np.cumsum([0, *(plan.sizes[content] for content in contents)])
    return {c: slot[first:last] for c, first, last in zip(contents, ends[:-1], ends[1:], strict=True)}
