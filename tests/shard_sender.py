"""The sending side of a sharded publication, as small as it can be: each rank of a trainer in a thread."""

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.ids import Version
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage, PendingExchange
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.delta.exchange import SendingDeltas, Snapshot
from millrace.weights.transfer.pipeline import SendPipeline, TransferTimes
from millrace.weights.transfer.session import PublicationSession
from millrace.weights.transfer.store import serve_store
from services.rollout.weights.transfer_request import TransferRequest

TIMEOUT_S = 30.0


class Shards:
    """`tensors` as a trainer has them: split by rows over `ranks` where there are rows, in float32. With `computed` the
    memory holds zeros, and the values are computed when they are sent."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        ranks: int = 2,
        content: Content = Content.MODEL,
        *,
        computed: bool = False,
    ) -> None:
        self.manifest = Manifest(
            tuple(TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()),
            content,
        )
        self._computed = computed
        self.ranks = [self._of_rank(list(tensors.values()), rank, ranks) for rank in range(ranks)]

    def _of_rank(self, tensors: list[torch.Tensor], rank: int, ranks: int) -> Memory:
        places, buffers = [], []
        for i, tensor in enumerate(tensors):
            first, part = 0, tensor.float()
            if tensor.dim() > 1:
                first, last = (n * len(tensor) // ranks for n in (rank, rank + 1))
                part = part[first:last].contiguous()
            offset = (first, *[0] * (tensor.dim() - 1))[: tensor.dim()]
            places.append(Place(i, offset, tuple(part.shape), len(buffers), 0, row_major_strides(part.shape)))
            buffers.append(part)
        if self._computed:
            values, buffers = buffers, [torch.zeros_like(part) for part in buffers]
            functions = {index: part.clone for index, part in enumerate(values)}
            return Memory(self.manifest, Layout.of(places, self.manifest), buffers, functions)
        return Memory(self.manifest, Layout.of(places, self.manifest), buffers)


class ShardSender:
    """Publishes `shards` as one version to receivers that want `wanted`. `hold_after` pauses before that round until
    `release()`; `corrupt` changes a byte of the first message on its way.

    With `snapshots`, one a rank, only what changed since the publication `base` is sent; everything without a `base`.
    """

    def __init__(
        self,
        shards: Shards,
        wanted: Sequence[Boxes],
        *,
        version: int,
        job: str = "job-test",
        epoch: int = 1,
        attempt: int = 0,
        mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_SHADOW,
        hold_after: int | None = None,
        corrupt: bool = False,
        timeout_s: float = TIMEOUT_S,
        snapshots: Sequence[Snapshot] = (),
        base: str = "",
    ) -> None:
        self.shards = shards
        layouts = weights_pb2.Sides(
            senders=wire_layouts.encode([memory.layout.boxes for memory in shards.ranks]),
            receivers=wire_layouts.encode(wanted),
            message_bytes=16384,
        )
        self.plan = wire_layouts.Planner().plan(shards.manifest, layouts)
        self._store, self.port = serve_store("127.0.0.1", self.plan.world_size, TIMEOUT_S)
        self.gate = threading.Event()
        self._hold_after, self._corrupt, self._snapshots = hold_after, corrupt, snapshots
        self.sent_bytes = 0
        self.request = TransferRequest(
            key=f"{job}/{version}/{epoch}/{attempt}",
            version=Version(version),
            manifest=shards.manifest,
            host="127.0.0.1",
            port=self.port,
            world_size=self.plan.world_size,
            first_rank=len(shards.ranks),
            timeout_s=timeout_s,
            path=weights_pb2.PATH_DELTA if snapshots else weights_pb2.PATH_SHARDED,
            layouts=layouts,
            communicator=f"{job}/{version}/{epoch}/{attempt}",
            mode=mode,
            base=base,
        )
        self.sums: dict[int, int] = {}
        self.failures: list[PublicationFailed] = []
        self.sessions = [PublicationSession() for _ in shards.ranks]
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(len(shards.ranks))
        ]

    @property
    def checksums(self) -> tuple[int, ...]:
        return tuple(self.sums[content] for content in range(len(self.plan.sizes)))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        self.gate.set()

    def join(self) -> None:
        """Waits until everything is out; raises what stopped it."""
        self.release()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for session in self.sessions:
            session.leave()
        if self.failures:
            raise self.failures[0]

    def _run(self, rank: int) -> None:
        rendezvous = Rendezvous(
            "127.0.0.1",
            self.port,
            self.request.communicator,
            rank,
            self.plan.world_size,
            b"",
            torch.device("cpu"),
            self.request.timeout_s,
        )
        sending = SendPipeline(self.plan, rank, self.shards.ranks[rank])
        try:
            self.sessions[rank].begin()
            give_up = time.monotonic() + self.request.timeout_s
            sums, _ = self.sessions[rank].run(
                rendezvous, self.request.key, give_up, lambda channel: self._send(rank, sending, channel)
            )
            self.sums.update(sums)
        except PublicationFailed as error:
            self.failures.append(error)

    def _send(self, rank: int, sending: SendPipeline, channel: Channel) -> tuple[Mapping[int, int], TransferTimes]:
        spoiled = Spoiled(channel, self)
        if not self._snapshots:
            return sending.run(spoiled)
        deltas = SendingDeltas(spoiled, self._snapshots[rank], sending.stream, whole=not self.request.base)
        sums, times = sending.run(deltas)
        self.sent_bytes += deltas.sent_bytes
        return sums, times

    def spoil(self, number: int, sends: Sequence[ChannelMessage]) -> Sequence[ChannelMessage]:
        """What becomes of a rank's round on its way."""
        if number == self._hold_after:
            self.gate.wait(TIMEOUT_S)
        if self._corrupt and number == (1 if self._snapshots else 0):  # of changes the header goes before
            changed = sends[0].data.clone()
            changed[0] ^= 1
            return [ChannelMessage(sends[0].number, sends[0].peer, changed), *sends[1:]]
        return sends


class Spoiled:
    """A channel that does to each round what the test says."""

    def __init__(self, channel: Channel, sender: ShardSender) -> None:
        self.key, self.rank, self.deadline = channel.key, channel.rank, channel.deadline
        self._channel, self._sender, self._rounds = channel, sender, 0

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: object = None
    ) -> PendingExchange:
        self._rounds += 1
        return self._channel.exchange(self._sender.spoil(self._rounds - 1, sends), receives, stream)

    def check(self) -> None:
        self._channel.check()

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
