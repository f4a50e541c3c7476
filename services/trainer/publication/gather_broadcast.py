"""Gather-and-broadcast: all ranks gather each tensor, and rank 0 broadcasts it to the receivers. The oracle that the
sharded transfer is compared with, bit for bit."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
from torch import Tensor
from torch.distributed import TCPStore

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.phases import PublicationId
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.store import serve_store
from millrace.wire.address import host_address
from services.trainer.protocol.adapter import Published
from services.trainer.protocol.backend import Backend, published

log = structlog.get_logger(__name__)

OPERATION_S = 20.0
"""Longest that a receiver may hold up one tensor. Gloo cannot be interrupted inside an operation, it only times out."""


@dataclass(frozen=True)
class Prepared:
    """The publication as PREPARE settled it."""

    publication: PublicationId
    dtype: str
    source: Published
    manifest: Manifest
    world_size: int
    """Ranks of the communicator: this sender and all receivers."""
    deadline: float
    """time.monotonic() when the publication has failed."""
    seconds: float
    """How long PREPARE took."""
    store: TCPStore | None
    """The store where the communicator is joined; on rank 0, and only if there is a receiver."""


class GatherBroadcastTransfer:
    """An `OutgoingTransfer`. All ranks gather; only rank 0 talks to receivers."""

    def __init__(self, rank: int, member_id: str) -> None:
        self._rank = rank
        self._member_id = member_id
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._broadcast: _Broadcast | None = None
        self._channel: GlooChannel | None = None
        self._watchdog: threading.Timer | None = None

    @property
    def publication(self) -> PublicationId | None:
        prepared = self._prepared
        return prepared.publication if prepared is not None else None

    def prepare_send(self, request: pb.PrepareSendRequest, backend: Backend) -> pb.PrepareSendResponse:
        began = time.monotonic()
        self.close()
        publication, source = (
            PublicationId.from_proto(request.publication),
            published(backend, Content.of(request.content)),
        )
        manifest = source.manifest(request.dtype)
        world_size = 1 + sum(receiver.world_size for receiver in request.receivers)
        host, store, port = host_address(), None, 0
        if self._rank == 0 and world_size > 1:
            store, port = serve_store(host, world_size, request.deadline_s)
        seconds = time.monotonic() - began
        deadline = began + request.deadline_s
        self._prepared = Prepared(publication, request.dtype, source, manifest, world_size, deadline, seconds, store)
        self._watchdog = threading.Timer(request.deadline_s, self.abort, ["its deadline has passed"])
        self._watchdog.daemon = True
        self._watchdog.start()
        return pb.PrepareSendResponse(
            manifest=manifest.to_proto(),
            rendezvous=weights_pb2.Rendezvous(host=host, port=port, world_size=world_size),
            plan_hash=gather_broadcast(manifest, world_size).hash,
        )

    def transfer(self, request: pb.TransferSendRequest, backend: Backend) -> pb.TransferSendResponse:
        """See `OutgoingTransfer`. Raises PublicationFailed on rank 0 only."""
        prepared = self._prepared
        assert prepared is not None, "the sender compares `publication` first"
        broadcast = self._broadcast = _Broadcast(prepared)
        try:
            self._channel = broadcast.join() if self._rank == 0 else None
            for info, tensor in broadcast.gathered(prepared.source.export(prepared.dtype)):
                if tensor is not None:
                    broadcast.send(info, tensor, self._channel)
        except PublicationFailed:
            self.close()
            raise
        report = weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=prepared.manifest.bytes,
            prepare_s=prepared.seconds,
            gather_s=broadcast.gather_s,
            wire_s=broadcast.wire_s,
            verify_s=broadcast.checksum_s,
        )
        return pb.TransferSendResponse(checksums=weights_pb2.Checksums(values=broadcast.checksums), report=report)

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer`. A transfer fails before its next tensor, or when the one that is being sent times
        out."""
        broadcast, channel = self._broadcast, self._channel
        if broadcast is not None:
            log.warning("publication aborted", key=broadcast.key, reason=reason)
            broadcast.fail(reason)
        if channel is not None:
            channel.abort()

    def finish(self, *, failed: bool) -> None:
        """See `OutgoingTransfer`. Nothing is kept for the next publication."""
        self.close()

    def close(self) -> None:
        with self._lock:
            channel, self._channel, self._prepared, self._broadcast = self._channel, None, None, None
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None
        if channel is not None:
            channel.close()


class _Broadcast:
    """One transfer on one rank: its seconds, its checksums, and the failure after which nothing more is sent."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._failure: PublicationFailed | None = None
        self.checksums: list[int] = []
        """One for each tensor, in the manifest's order."""
        self.gather_s = self.wire_s = self.checksum_s = 0.0

    @property
    def key(self) -> str:
        """The publication's key, for messages."""
        return self._prepared.publication.key

    def fail(self, reason: str) -> None:
        """Stops the sending; `gathered` raises at its end. A later failure replaces an earlier one: the channel's is
        the more exact."""
        what = f"publication {self.key} failed: {reason}"
        self._failure = PublicationFailed(what, "publish again with a new attempt.")

    def join(self) -> GlooChannel | None:
        """Joins the receivers' communicator. A failure is raised only when all is gathered: the other ranks have begun
        to gather, and need this one."""
        prepared, began = self._prepared, time.monotonic()
        if prepared.store is None:
            return None
        try:
            return GlooChannel.join(
                host_address(),
                prepared.store.port,
                key=prepared.publication.key,
                rank=0,
                world_size=prepared.world_size,
                timeout_s=min(OPERATION_S, max(0.1, prepared.deadline - began)),
                store=prepared.store,
            )
        except PublicationFailed as error:
            self.fail(error.what)
            return None
        finally:
            self.wire_s += time.monotonic() - began

    def gathered(
        self, tensors: Iterator[tuple[TensorInfo, Tensor | None]]
    ) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """All of `tensors`, timed. Raises PublicationFailed after the last one if something has failed meanwhile."""
        began = time.monotonic()
        for item in tensors:
            self.gather_s += time.monotonic() - began
            yield item
            began = time.monotonic()
        if self._failure is not None:
            raise self._failure

    def send(self, info: TensorInfo, tensor: Tensor, channel: GlooChannel | None) -> None:
        """Takes the tensor's checksum and broadcasts it; without receivers there is no channel."""
        if self._failure is not None:
            return
        began = time.monotonic()
        tensor = tensor.cpu()
        self.checksums.append(checksum(tensor))
        summed = time.monotonic()
        self.checksum_s += summed - began
        if channel is None:
            return
        try:
            channel.broadcast(tensor)
        except PublicationFailed as error:
            self.fail(f"{info.name} could not be sent: {error.what}")
        self.wire_s += time.monotonic() - summed
