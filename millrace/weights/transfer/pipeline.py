"""Pack → send and receive → unpack, round after round, with several rounds in progress.

A sender packs round n + 1 while round n is on its way; a receiver unpacks round n − 1 meanwhile. The messages of a
round share one slot of a ring. Every slot knows the round that it was claimed for, so that using it for another one is
an error."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from millrace.errors import PublicationFailed
from millrace.weights.plans.manifest import ITEM_BYTES
from millrace.weights.plans.memory import Memory, PieceInMessage, pieces_in_messages
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.plans.wanted_pieces import ALIGNED
from millrace.weights.transfer.channels.channel import ChannelMessage, MessageExchange, PendingExchange
from millrace.weights.transfer.device_stream import DeviceStream, Stopwatch
from millrace.weights.transfer.round_operations import (
    RoundOperations,
    differing_counts,
    message_checksums,
    round_operations,
)

SLOTS = 3
"""Slots of a ring. A message that is passed on to another replica is needed for one round longer, so two are too
few."""

_FIX_MEMORY = "look at the memory of the worker's host and device."


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one run on one rank."""

    pack_s: float
    """Packing and converting."""
    verify_s: float
    """Checksums."""
    apply_s: float
    """Unpacking and comparing."""
    whole_s: float
    code_s: float = 0.0
    """Encoding or decoding, if only changes travel."""

    @property
    def wire_s(self) -> float:
        """What remains for the channel. On a GPU the other work is done meanwhile, and most of it costs no time."""
        return max(0.0, self.whole_s - self.pack_s - self.verify_s - self.apply_s - self.code_s)


class SlotRing:
    """Slots of equal size, reused in turn by the rounds of one rank."""

    def __init__(self, slots: int, size: int, device: torch.device) -> None:
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._claimed = [-1] * slots

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def slot(self, step: int) -> torch.Tensor:
        """The memory of a step, [bytes] uint8, claimed or not."""
        return self._memory[step % len(self._memory)]

    def restart(self) -> None:
        """Forgets all claims, for the next run."""
        self._claimed = [-1] * len(self._memory)

    def claim(self, step: int) -> None:
        """Claims a step's slot, before it is written. Raises PublicationFailed if a later step has claimed it."""
        index = step % len(self._memory)
        if self._claimed[index] not in (-1, step - len(self._memory)):
            raise PublicationFailed(f"slot {index} was claimed for step {self._claimed[index]} before {step}.")
        self._claimed[index] = step

    def check(self, step: int) -> None:
        """Checks a step's slot, before it is read. Raises PublicationFailed if it holds another step's bytes."""
        if (held := self._claimed[step % len(self._memory)]) != step:
            raise PublicationFailed(
                f"a slot holds step {held} where {step} was to be read.", "report it with the plan."
            )


class SendPipeline:
    """A sending rank's part of a plan; made once for a plan, run for each version."""

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, slots: int = SLOTS) -> None:
        self._steps = plan.steps(rank)
        self.stream = DeviceStream(memory.device)
        outgoing = [list(dict.fromkeys(content for content, _ in step.sends)) for step in self._steps]
        size = max((int(plan.sizes[contents].sum()) for contents in outgoing), default=0)
        self._ring = SlotRing(min(slots, max(1, len(self._steps))), size, memory.device)
        self._messages: list[dict[int, torch.Tensor]] = []
        for number, contents in enumerate(outgoing):
            self._messages.append(_messages(plan, contents, self._ring.slot(number)))
        self._rounds, _ = _operations(plan, self._messages, memory, every=False)
        self._with_gaps = _messages_with_gaps(plan, self._messages, memory)
        self.bytes = sum(int(plan.sizes[content]) for step in self._steps for content, _ in step.sends)
        self.slot_bytes = self._ring.bytes
        self.device = memory.device
        self.packed = {content: message.numel() for messages in self._messages for content, message in messages.items()}
        """Content → size of its message, for all contents that this rank packs."""

    def run(self, channel: MessageExchange) -> tuple[Mapping[int, int], TransferTimes]:
        """Sends everything. Returns the checksum of each content that this rank packed, taken from the packed bytes."""
        exchanges: list[PendingExchange] = []
        packing, summing = Stopwatch(self.stream), Stopwatch(self.stream)
        began = time.perf_counter()
        self._ring.restart()
        self.stream.follow_current()
        for number, step in enumerate(self._steps):
            if number >= len(self._ring):
                exchanges[number - len(self._ring)].wait()
            self._ring.claim(number)
            with torch.no_grad(), self.stream:
                with packing:
                    _zero(self._with_gaps[number])
                    self._rounds[number].pack()
                with summing:
                    self._rounds[number].sum_messages()
            self._ring.check(number)
            messages = [ChannelMessage(content, peer, self._messages[number][content]) for content, peer in step.sends]
            exchanges.append(channel.exchange(messages, (), self.stream.cuda))
        for exchange in exchanges[-len(self._ring) :]:
            exchange.wait()
        self.stream.join(channel.check)
        with self.stream:
            checksums = message_checksums(self._rounds)
        return checksums, TransferTimes(packing.seconds(), summing.seconds(), 0.0, time.perf_counter() - began)


@dataclass(frozen=True)
class ReceivedMessages:
    """What one run of a ReceivePipeline received."""

    sums: Mapping[int, int]
    """Content → checksum of its bytes as they arrived."""
    times: TransferTimes


class ReceivePipeline:
    """A receiving rank's part of a plan; made once for a plan, run for each version.

    Staged, everything is received into separate memory while the engine generates, and `apply` puts it in place;
    otherwise each round is put in place when it arrives, and only a few slots are needed.
    """

    def __init__(self, plan: ShardedPlan, rank: int, memory: Memory, *, staged: bool, slots: int = SLOTS) -> None:
        self._staged = staged
        self._steps = plan.steps(rank)
        self.stream = DeviceStream(memory.device)
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
        self._rounds, pieces = _operations(plan, by_step, memory, every=True)
        # What is staged is put in place at once: a launch for each round would be most of the pause.
        self._all_rounds = round_operations(pieces, {}, memory.device) if staged else None
        self._with_gaps = _messages_with_gaps(plan, by_step, memory)
        self._names = [_names(plan, contents, memory) for contents in incoming]
        self.bytes = sum(int(plan.sizes[content]) for content in self._messages)
        self.slot_bytes = self._ring.bytes
        self.device = memory.device
        self.stream.follow_current()

    def run(self, channel: MessageExchange, *, onto_base: bool = False) -> ReceivedMessages:
        """Receives everything, and passes on the contents that other replicas get from this rank. With `onto_base`,
        each message holds what memory holds now before it is received: for a channel that brings only what changed.
        Raises PublicationFailed if that fails, or if memory does not hold what was put in place."""
        progress = _Progress(Stopwatch(self.stream), Stopwatch(self.stream), onto_base)
        began = time.perf_counter()
        self._ring.restart()
        if not self._staged:  # the engine must be done with its parameters; it never uses separate memory
            self.stream.follow_current()
        for number in range(len(self._steps)):
            self._start_exchange(number, progress, channel)
            self._finish_step(number - 1, progress)
        self._finish_step(len(self._steps) - 1, progress)
        for exchange in progress.exchanges:
            exchange.wait()
        if self._all_rounds is not None:
            with self.stream:
                self._all_rounds.note_pieces()
        self.stream.join(channel.check)
        with self.stream:
            checksums = message_checksums(self._rounds)
        self._raise_differing()
        seconds = time.perf_counter() - began
        times = TransferTimes(0.0, progress.summing.seconds(), progress.placing.seconds(), seconds)
        return ReceivedMessages(checksums, times)

    def _start_exchange(self, number: int, progress: "_Progress", channel: MessageExchange) -> None:
        """Starts a step's messages, once the contents that it passes on are received and its slot is free."""
        step = self._steps[number]
        if any(self._step_of[content] == number - 1 for content, _ in step.sends):
            self._finish_step(number - 1, progress)
        if not self._staged:
            if number >= len(self._ring):
                progress.exchanges[number - len(self._ring)].wait()
            self._ring.claim(number)
            for content, _ in step.sends:
                self._ring.check(self._step_of[content])
        if progress.onto_base:
            with torch.no_grad(), self.stream, progress.placing:
                _zero(self._with_gaps[number])
                self._rounds[number].pack()
        sends = [ChannelMessage(content, peer, self._messages[content]) for content, peer in step.sends]
        receives = [ChannelMessage(content, peer, self._messages[content]) for content, peer in step.receives]
        progress.exchanges.append(channel.exchange(sends, receives, self.stream.cuda))

    def _finish_step(self, number: int, progress: "_Progress") -> None:
        """Waits for a step's messages, takes their checksums and, unless staged, puts them in place. Does nothing for a
        step that is finished."""
        if number < progress.finished:
            return
        progress.exchanges[number].wait_received(self.stream.cuda)
        progress.finished = number + 1
        if not self._staged:
            self._ring.check(number)
        with torch.no_grad(), self.stream:
            with progress.summing:
                self._rounds[number].sum_messages()
            if not self._staged:
                with progress.placing:
                    self._rounds[number].unpack()
                    self._rounds[number].compare()

    def apply(self) -> tuple[float, float]:
        """Puts what was staged in place and compares it there: on a CPU bit for bit, on a GPU by checksums. Returns the
        seconds of both. Raises PublicationFailed if memory does not hold what was received."""
        assert self._all_rounds is not None, "only what was staged is to be put in place"
        began = time.perf_counter()
        self.stream.follow_current()
        with torch.no_grad(), self.stream:
            self._all_rounds.unpack()
        self.stream.join()
        written = time.perf_counter()
        with torch.no_grad(), self.stream:
            self._all_rounds.compare_noted()
            (differing,) = differing_counts([self._all_rounds])
        if differing:
            with torch.no_grad(), self.stream:
                for operations in self._rounds:  # each round knows the names of its tensors
                    operations.compare()
            self._raise_differing()
            raise PublicationFailed("the engine holds other bytes than those that were received.", _FIX_MEMORY)
        return written - began, time.perf_counter() - written

    def _raise_differing(self) -> None:
        with self.stream:
            counts = differing_counts(self._rounds)
        if differing := [names for count, names in zip(counts, self._names, strict=True) if count]:
            what = f"{differing[0]} differ in the engine from what was received, {len(differing)} rounds in all."
            raise PublicationFailed(what, _FIX_MEMORY)


@dataclass
class _Progress:
    """How far one run of a ReceivePipeline is."""

    summing: Stopwatch
    placing: Stopwatch
    onto_base: bool
    """Messages are received onto what memory holds."""
    exchanges: list[PendingExchange] = field(default_factory=list)
    """Started, by step."""
    finished: int = 0
    """Steps whose messages have arrived and are summed."""


def _operations(
    plan: ShardedPlan, by_step: Sequence[Mapping[int, torch.Tensor]], memory: Memory, *, every: bool
) -> tuple[list[RoundOperations], list[PieceInMessage]]:
    """The operations of each step, and the pieces of all steps."""
    messages = {content: message for of_step in by_step for content, message in of_step.items()}
    pieces_of = pieces_in_messages(plan, messages, memory, every=every)
    pieces = [[piece for content in of_step for piece in pieces_of[content]] for of_step in by_step]
    rounds = [round_operations(found, of_step, memory.device) for found, of_step in zip(pieces, by_step, strict=True)]
    return rounds, [piece for of_step in pieces for piece in of_step]


def _messages_with_gaps(
    plan: ShardedPlan, by_step: Sequence[Mapping[int, torch.Tensor]], memory: Memory
) -> list[list[torch.Tensor]]:
    """For each step the messages with bytes that belong to no piece, because a piece ends elsewhere than at a multiple
    of ALIGNED. These bytes are zero in every message, so that two ranks that pack the same content make the same
    message."""
    item = np.array([ITEM_BYTES[tensor.dtype] for tensor in memory.manifest.tensors], np.int64)
    uneven = plan.pieces.numel * item[plan.pieces.tensor] % ALIGNED != 0
    contents = set((np.searchsorted(plan.first, np.flatnonzero(uneven), side="right") - 1).tolist())
    return [[message for content, message in messages.items() if content in contents] for messages in by_step]


def _zero(messages: Sequence[torch.Tensor]) -> None:
    for message in messages:
        message.zero_()


def _names(plan: ShardedPlan, contents: Sequence[int], memory: Memory) -> str:
    """Names of the tensors that a round has pieces of, shortened, for messages."""
    found = sorted({int(n) for content in contents for n in plan.pieces.tensor[plan.pieces_in(content)][:50]})
    names = [memory.manifest.tensors[i].name for i in found[:3]]
    return ", ".join(names) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _messages(plan: ShardedPlan, contents: Sequence[int], slot: torch.Tensor) -> dict[int, torch.Tensor]:
    """The part of the slot where each content is."""
    ends = np.cumsum([0, *(plan.sizes[content] for content in contents)])
    return {c: slot[first:last] for c, first, last in zip(contents, ends[:-1], ends[1:], strict=True)}
