"""A channel whose messages travel encoded: each is announced by a header, which says how and in how many bytes."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from millrace.weights.transfer.channels.channel import ChannelMessage, MessageExchange, PendingExchange
from millrace.weights.transfer.delta.codec import HEADER_BYTES, Coding, Header, apply, changed_words, encode
from millrace.weights.transfer.device_stream import DeviceStream, Stopwatch

FEW = 50
"""If fewer than one word in this many bytes changed, the changed words are copied alone."""


class Snapshot:
    """The bytes of every message that one rank packs, by content of the plan.

    What always holds: while `publication` names a publication, the bytes are those that every receiver of it has put in
    place, or will not serve. The name is taken away before the first byte changes, and given again once a publication
    is known to have sent everything.
    """

    def __init__(self, plan_hash: bytes, sizes: Mapping[int, int], device: torch.device) -> None:
        """`sizes`: bytes of each content's message. The host memory is pinned if `device` is a GPU. Raises
        RuntimeError if there is not enough."""
        self.plan_hash = plan_hash
        self.publication = ""
        """Key of the publication whose messages these are; empty for none."""
        memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
        parts = torch.split(memory, list(sizes.values()))
        self._messages = dict(zip(sizes, parts, strict=True))
        self.bytes = memory.numel()

    def encode(self, content: int, message: torch.Tensor, *, whole: bool) -> tuple[Header, torch.Tensor]:
        """How a message ([bytes] uint8) travels to receivers that hold the snapshot's, or with `whole` to others; from
        now on the snapshot holds it. On a GPU the work is put on the current stream."""
        kept = self._messages[content]
        if whole:
            kept.copy_(message, non_blocking=True)
            return Header(Coding.WHOLE, message.numel()), message
        base = kept.to(message.device, non_blocking=True)
        changed = changed_words(base, message)
        header, encoded = encode(base, message, changed)
        if kept.device == message.device and FEW * header.changed < message.numel():
            new = message.view(torch.int16).index_select(0, changed)
            kept.view(torch.int16).index_copy_(0, changed, new)
        elif header.changed:
            kept.copy_(message, non_blocking=True)
        return header, encoded


ROUNDS = 3
"""Rounds whose encoded bytes a receiver keeps at most."""
HEADERS = 1 << 30
"""The header of content n is message HEADERS + n."""


@dataclass(frozen=True)
class _Frame:
    """One message as it travels."""

    header: torch.Tensor
    """[HEADER_BYTES] uint8 on the message's device."""
    encoded: torch.Tensor


class SendingDeltas:
    """A `MessageExchange` for a `SendPipeline`: encodes each message against the snapshot."""

    def __init__(self, channel: MessageExchange, snapshot: Snapshot, stream: DeviceStream, *, whole: bool) -> None:
        """`whole`: the receivers do not hold what the snapshot holds."""
        self._channel = channel
        self._snapshot = snapshot
        self._whole = whole
        self._encoding = Stopwatch(stream)
        self.sent_bytes = 0
        self.packed_words = 0
        """16-bit words of all messages, and those of them that changed."""
        self.changed_words = 0

    @property
    def encode_s(self) -> float:
        """Seconds of comparing and encoding, when the stream has done its work."""
        return self._encoding.seconds()

    def check(self) -> None:
        self._channel.check()

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        """See `MessageExchange`. A sender receives nothing."""
        assert not receives, "a sender of deltas receives nothing"
        frames: dict[int, _Frame] = {}
        with _on(stream), torch.no_grad(), self._encoding:
            for message in {m.number: m for m in sends}.values():
                header, encoded = self._snapshot.encode(message.number, message.data, whole=self._whole)
                frames[message.number] = _Frame(header.to_bytes().to(message.data.device), encoded)
                self.packed_words += message.data.numel() // 2
                self.changed_words += header.changed
        headers, bodies = _of_frames(sends, frames)
        self.sent_bytes += sum(m.data.numel() for m in [*headers, *bodies])
        return _Both(
            self._channel.exchange(headers, (), stream), self._channel.exchange(bodies, (), stream) if bodies else None
        )


class ReceivingDeltas:
    """A `MessageExchange` for a `ReceivePipeline` that runs `onto_base`: messages hold the base before `exchange`, and
    the version after `wait_received`. What other replicas get from this rank is passed on as it arrived."""

    def __init__(self, channel: MessageExchange, stream: DeviceStream) -> None:
        self._channel = channel
        self._decoding = Stopwatch(stream)
        self._frames: dict[int, _Frame] = {}
        """What arrived in the last round: it is passed on in this one."""
        self._in_progress: deque[_Decoding] = deque()

    @property
    def decode_s(self) -> float:
        """Seconds of applying changes, when the stream has done its work."""
        return self._decoding.seconds()

    def check(self) -> None:
        self._channel.check()

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        """See `MessageExchange`. Returns when the headers have arrived, since they say how much to receive."""
        announced = {m.number: torch.empty(HEADER_BYTES, dtype=torch.uint8, device=m.data.device) for m in receives}
        of_sends, bodies = _of_frames(sends, self._frames)
        of_receives = [ChannelMessage(HEADERS + m.number, m.peer, announced[m.number]) for m in receives]
        self._channel.exchange(of_sends, of_receives, stream).wait()
        headers = {m.number: Header.of_bytes(announced[m.number], m.data.numel()) for m in receives}
        with _on(stream):
            encoded = {m.number: _room(headers[m.number], m.data) for m in receives}
        self._frames = {number: _Frame(announced[number], encoded[number]) for number in announced}
        incoming = [ChannelMessage(m.number, m.peer, encoded[m.number]) for m in receives if encoded[m.number].numel()]
        changes = [(headers[m.number], encoded[m.number], m.data) for m in receives if headers[m.number].changed]
        pending = self._channel.exchange(bodies, incoming, stream) if bodies or incoming else None
        decoding = _Decoding(pending, [c for c in changes if c[0].coding is not Coding.WHOLE], self._decoding)
        self._in_progress.append(decoding)
        if len(self._in_progress) > ROUNDS:
            self._in_progress.popleft().wait()
        return decoding


class _Both:
    """A `PendingExchange` of headers and bodies."""

    def __init__(self, headers: PendingExchange, bodies: PendingExchange | None) -> None:
        self._parts = [headers] if bodies is None else [headers, bodies]

    def wait_received(self, stream: Any = None) -> None:
        for part in self._parts:
            part.wait_received(stream)

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
        self._parts = []  # frees the encoded bytes


class _Decoding:
    """A `PendingExchange` whose changes are applied to their messages once, when they have arrived."""

    def __init__(
        self,
        bodies: PendingExchange | None,
        changes: Sequence[tuple[Header, torch.Tensor, torch.Tensor]],
        decoding: Stopwatch,
    ) -> None:
        self._bodies = bodies
        self._changes = changes
        self._decoding = decoding

    def wait_received(self, stream: Any = None) -> None:
        if self._bodies is not None:
            self._bodies.wait_received(stream)
        changes, self._changes = self._changes, ()
        with _on(stream), torch.no_grad(), self._decoding:
            for header, encoded, message in changes:
                apply(header, encoded, message)

    def wait(self) -> None:
        if self._bodies is not None:
            self._bodies.wait()
            self._bodies = None  # frees the encoded bytes


def _of_frames(
    sends: Sequence[ChannelMessage], frames: Mapping[int, _Frame]
) -> tuple[list[ChannelMessage], list[ChannelMessage]]:
    """Headers and bodies of the messages to send."""
    headers = [ChannelMessage(HEADERS + m.number, m.peer, frames[m.number].header) for m in sends]
    bodies = [ChannelMessage(m.number, m.peer, frames[m.number].encoded) for m in sends]
    return headers, [body for body in bodies if body.data.numel()]


def _room(header: Header, message: torch.Tensor) -> torch.Tensor:
    """Memory for the encoded bytes: a whole message is received where it belongs."""
    if header.coding is Coding.WHOLE:
        return message
    return torch.empty(header.size, dtype=torch.uint8, device=message.device)


def _on(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
