"""The trainer's state, sent from memory to memory to trainers that stand by.

Each rank copies the parts that it holds into one block of host memory, and a thread sends that block to the rank with
the same number of each trainer that stands by, while training continues. The receiver compares checksums. It puts
nothing in place before all of its ranks hold the whole of one version; what is under way when either side dies is
forgotten.
"""

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.distributed import TCPStore

from millrace.contracts.v1 import trainer_pb2, weights_pb2
from millrace.errors import InvalidState, MillraceError, PartialStep, PublicationFailed
from millrace.ids import Version
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage, PendingExchange
from millrace.weights.transfer.channels.rendezvous import Rendezvous, serve_store
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.session import PublicationSession
from millrace.wire.address import host_address
from services.trainer.checkpoints.box_files import DTYPES, keyed_parts
from services.trainer.checkpoints.copying import copy_to_host
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks import collectives

log = structlog.get_logger(__name__)

PIECE_BYTES = 8 << 20
"""Bytes of a message."""
AHEAD = 2
"""Messages on their way at a time."""
STALL_S = 5.0
"""A copy is given up if no message arrives for this long: the other end is stopped, or its host is gone."""
JOIN_S = 10.0
"""Longest wait for the other end to connect."""
ALIGNMENT = 64
"""Each box begins at a multiple of so many bytes."""
LARGEST_HEADER_BYTES = 256 << 20
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """What a block holds."""

    copy: str
    """Name of the copy, which all ranks of both trainers know."""
    version: Version
    updates: dict[str, int]
    """Number of optimizer updates of each model, by the prefix of the model's tensors."""
    kl_coefficient: float
    model: str
    """Hash of the manifest of the policy, hexadecimal."""
    boxes: dict[str, tuple[str, list[int]]]
    """Name of the dtype in safetensors and shape of each box, by key, in the order of the block."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Header":
        fields = json.loads(data)
        fields["boxes"] = {key: (dtype, shape) for key, (dtype, shape) in fields["boxes"].items()}
        return cls(**fields)

    def places(self) -> tuple[dict[str, tuple[int, int]], int]:
        """First byte and end of each box in the block, and the size of the block in bytes."""
        found, at = {}, 0
        for key, (dtype, shape) in self.boxes.items():
            size = int(np.prod(shape, dtype=np.int64)) * _TORCH[dtype].itemsize
            found[key] = (at, at + size)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return found, at


class StandbyCopies:
    """One rank's part in copies, of the trainer that sends them or of one that stands by. Used on the main thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._memory = torch.empty(0, dtype=torch.uint8)
        """The block. It is kept from copy to copy, because new memory takes several times as long to write."""
        self._store: tuple[TCPStore, int] | None = None
        """On rank 0 of the sender: the store at which both ends of a copy meet, and its port."""
        self._sending: list[tuple[threading.Thread, PublicationSession]] = []

    # The trainer in the seat.

    def send(
        self, backend: Backend, version: Version, kl_coefficient: float, receivers: int, deadline_s: float
    ) -> list[weights_pb2.Rendezvous]:
        """Copies the present state to host memory and begins to send it to this number of trainers. Returns where each
        of them meets this one; nothing if a rank still sends the copy before. A collective.

        Raises InvalidState, on every rank, if one has no memory for it."""
        if any(collectives.gather_bytes(b"busy" if self.busy else b"")):
            return []
        meet = self._meet(version, receivers)
        parts = _held(backend)
        described = {key: (DTYPES[part.dtype], list(part.shape)) for key, part in parts.items()}
        updates = {prefix: model.updates for prefix, model in models(backend).items()}
        own = backend.manifest("float32").hash.hex()
        header = Header("", version, updates, kl_coefficient, own, described)
        with collectives.fail_together():
            boxes = self._boxes(header)
            copy_to_host((parts[key] for key in boxes), boxes.values())
        self._sending = []
        for each in meet:
            named, session = replace(header, copy=each.key), PublicationSession()
            session.begin()
            arguments = (session, each, named, self._pieces(header), time.monotonic() + deadline_s)
            thread = threading.Thread(target=self._send, args=arguments, name=f"send {each.key}", daemon=True)
            self._sending.append((thread, session))
            thread.start()
        return meet

    @property
    def busy(self) -> bool:
        """Whether a copy is still being sent."""
        return any(thread.is_alive() for thread, _ in self._sending)

    def _meet(self, version: Version, receivers: int) -> list[weights_pb2.Rendezvous]:
        """The place at which each receiver meets this trainer, the same on all ranks. A collective."""
        names = trainer_pb2.CopyStateResponse()
        if self._rank == 0:
            if self._store is None:
                self._store = serve_store(host_address(), None, JOIN_S)
            for number in range(receivers):
                key = f"standby/{version}/{number}/{secrets.token_hex(8)}"
                names.rendezvous.add(host=host_address(), port=self._store[1], world_size=2, key=key)
        agreed = collectives.gather_bytes(names.SerializeToString())[0]
        return list(trainer_pb2.CopyStateResponse.FromString(agreed).rendezvous)

    def _send(
        self,
        session: PublicationSession,
        meet: weights_pb2.Rendezvous,
        header: Header,
        pieces: Sequence[Tensor],
        deadline: float,
    ) -> None:
        """Sends a copy, in a thread of its own. One that fails is dropped: the next copy has everything again."""
        began = time.monotonic()

        def send(channel: Channel) -> None:
            _send_pieces(_Messages(channel, deadline), header, pieces)

        try:
            session.run(self._pair(meet, end=0), meet.key, deadline, send)
        except MillraceError as error:
            log.warning("a copy for a trainer that stands by was dropped", version=header.version, error=str(error))
        else:
            log.debug("a copy was sent", version=header.version, seconds=round(time.monotonic() - began, 3))
        finally:
            session.leave()

    # A trainer that stands by.

    def receive(self, meet: weights_pb2.Rendezvous, version: Version, backend: Backend, deadline_s: float) -> Header:
        """Receives the state of `version`. Returns on every rank once all of them hold the whole of their parts;
        nothing is put in place yet. A collective.

        Raises PublicationFailed, on every rank, if it does not arrive at one of them; InvalidState if the sender's rank
        holds other parts than this one."""
        deadline, session = time.monotonic() + deadline_s, PublicationSession()
        held = {key: (DTYPES[part.dtype], list(part.shape)) for key, part in _held(backend).items()}
        model = backend.manifest("float32").hash.hex()

        def receive(channel: Channel) -> Header | None:
            header, messages = _received_header(channel, deadline)
            named = (header.copy, header.version, header.model) == (meet.key, version, model)
            if not named or any(header.boxes.get(key) != box for key, box in held.items()):
                return None
            self._receive_block(messages, header)
            return header

        with collectives.fail_together():
            session.begin()
            try:
                header = session.run(self._pair(meet, end=1), meet.key, deadline, receive)
            finally:
                session.leave()
            if header is None:
                what = f"rank {self._rank} of the trainer in the seat holds other parts of the state than this rank."
                raise InvalidState(what, "start both trainers with the same number of ranks.")
        return header

    def _receive_block(self, messages: "_Messages", header: Header) -> None:
        pieces, found = self._pieces(header), []
        for number, piece in enumerate(pieces):
            messages.receive(piece)
            if number >= AHEAD:
                found.append(checksum(pieces[number - AHEAD]))
        sums = torch.empty(8 * len(pieces), dtype=torch.uint8)
        messages.receive(sums)
        messages.finish()
        found += [checksum(piece) for piece in pieces[len(found) :]]
        if found != sums.numpy().view(np.uint64).tolist():
            what = f"rank {self._rank} received other bytes than were sent of copy {header.copy}."
            raise PublicationFailed(what, "the next copy is a whole one.")
        messages.send(torch.ones(1, dtype=torch.uint8))
        messages.finish()

    def put_in_place(self, backend: Backend, header: Header) -> None:
        """Writes what was received into the backend. A collective. Raises PartialStep, on every rank, if one holds
        other parts than it received: the backend's state is of no version then."""
        parts: dict[str, Tensor] = {}
        for prefix, model in models(backend).items():
            parts |= keyed_parts(prefix, model.prepare_state(header.updates[prefix]))
        boxes = self._boxes(header)
        with collectives.fail_together():
            if parts.keys() != boxes.keys():
                what = f"rank {self._rank} holds other parts of the state of version {header.version} than it received."
                raise PartialStep(what, "the trainer loads the job again, from the newest state on the disk.")
        for key, part in parts.items():
            part.copy_(boxes[key])

    def close(self) -> None:
        """Ends what is being sent, and frees the memory."""
        for _, session in self._sending:
            session.fail("the trainer ends it")
        for thread, _ in self._sending:
            thread.join(STALL_S)
        self._sending, self._store = [], None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _pair(self, meet: weights_pb2.Rendezvous, *, end: int) -> Rendezvous:
        """The communicator of this rank with the one of the same number: the sender is its rank 0."""
        device = torch.device("cpu")
        return Rendezvous(meet.host, meet.port, f"{meet.key}/{self._rank}", end, 2, b"", device, JOIN_S)

    def _block(self, header: Header) -> Tensor:
        _, size = header.places()
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees it before more is allocated
            try:
                self._memory = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as error:
                what = f"rank {self._rank} has no host memory for a copy of {size} bytes of the state: {error}"
                fix = "run the trainer on a host with more memory, or without one that stands by."
                raise InvalidState(what, fix) from error
        return self._memory[:size]

    def _boxes(self, header: Header) -> dict[str, Tensor]:
        block, (places, _) = self._block(header), header.places()
        return {
            key: block[first:end].view(_TORCH[header.boxes[key][0]]).view(header.boxes[key][1])
            for key, (first, end) in places.items()
        }

    def _pieces(self, header: Header) -> tuple[Tensor, ...]:
        block = self._block(header)
        return block.split(PIECE_BYTES) if block.numel() else ()


def _held(backend: Backend) -> Mapping[str, Tensor]:
    """The parts of the state that this rank holds, by key."""
    held: dict[str, Tensor] = {}
    for prefix, model in models(backend).items():
        held |= keyed_parts(prefix, model.state())
    return held


def _send_pieces(messages: "_Messages", header: Header, pieces: Sequence[Tensor]) -> None:
    """Sends a block after its header, and returns once the receiver has compared the checksums."""
    data, sums = header.encode(), []
    messages.send(torch.tensor([len(data)]).view(torch.uint8))
    messages.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for piece in pieces:
        messages.send(piece)
        sums.append(checksum(piece))
    messages.send(torch.from_numpy(np.array(sums, np.uint64).view(np.uint8)))
    messages.receive(torch.empty(1, dtype=torch.uint8))
    messages.finish()


def _received_header(channel: Channel, deadline: float) -> tuple[Header, "_Messages"]:
    """Raises PublicationFailed for one that is too large."""
    messages, size = _Messages(channel, deadline), torch.empty(8, dtype=torch.uint8)
    messages.receive(size)
    messages.finish()
    if not 0 < (length := int(size.view(torch.int64))) <= LARGEST_HEADER_BYTES:
        raise PublicationFailed(f"a header of {length} bytes was announced.", "run the same release everywhere.")
    data = torch.empty(length, dtype=torch.uint8)
    messages.receive(data)
    messages.finish()
    return Header.decode(data.numpy().tobytes()), messages


class _Messages:
    """The messages of a copy, in an order that both ends know, AHEAD of them on their way. Raises PublicationFailed if
    none arrives for STALL_S."""

    def __init__(self, channel: Channel, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline
        self._number = 0
        self._pending: deque[PendingExchange] = deque()

    def send(self, data: Tensor) -> None:
        self._exchange(data, sends=True)

    def receive(self, data: Tensor) -> None:
        """Begins to receive into `data`; it is there once AHEAD more have begun, or at `finish`."""
        self._exchange(data, sends=False)

    def finish(self) -> None:
        """Waits for all of them."""
        while self._pending:
            self._wait()

    def _exchange(self, data: Tensor, *, sends: bool) -> None:
        while len(self._pending) >= AHEAD:
            self._wait()
        message = [ChannelMessage(self._number, 1 - self._channel.rank, data)]
        self._number += 1
        self._move_deadline()
        self._pending.append(self._channel.exchange(message, []) if sends else self._channel.exchange([], message))

    def _wait(self) -> None:
        self._move_deadline()
        self._pending.popleft().wait()

    def _move_deadline(self) -> None:
        self._channel.deadline = min(self._deadline, time.monotonic() + STALL_S)
