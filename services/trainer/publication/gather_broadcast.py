"""The sender's side of a publication. Here by gathering and broadcasting, the oracle for every faster path; sharded
ones are handed to `send_shards`.

PREPARE and TRANSFER run on every rank's main thread; only rank 0 talks to receivers. FINISH and abort may come from
another thread at any time.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
from torch import Tensor
from torch.distributed import TCPStore

from millrace.errors import Fenced, InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.weights.phases import PublicationId
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.plan import gather_broadcast
from millrace.weights.transfer.channels.gloo import GlooChannel, serve_store
from millrace.weights.transfer.checksum import checksum
from millrace.wire.server import host_address
from millrace.wire.v1 import weights_pb2
from millrace.wire.v1.trainer_pb2 import (
    DescribeSendRequest,
    DescribeSendResponse,
    PrepareSendRequest,
    PrepareSendResponse,
    TransferSendRequest,
    TransferSendResponse,
)
from services.trainer.protocol.backend import Backend
from services.trainer.publication.sharded import ShardSender, describe

log = structlog.get_logger(__name__)

OPERATION_S = 20.0
"""Longest that a receiver may hold up one tensor. Gloo cannot be interrupted inside an operation, only time out."""


@dataclass(frozen=True)
class Prepared:
    """What PREPARE settled."""

    publication: PublicationId
    dtype: str
    manifest: Manifest
    world_size: int
    """Ranks of the communicator: this sender and all receivers."""
    give_up: float
    """time.monotonic() when the publication has failed."""
    seconds: float
    store: TCPStore | None
    """Where the communicator meets; rank 0's, and only where there is a receiver."""


class Sender:
    def __init__(self, rank: int, member_id: str) -> None:
        self._rank = rank
        self._member_id = member_id
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._sending: _Sending | None = None
        self._channel: GlooChannel | None = None
        self._watchdog: threading.Timer | None = None
        self._shards = ShardSender(rank, member_id)
        self._sharded = False
        """Whether the publication under way is."""

    def describe(self, request: DescribeSendRequest, backend: Backend) -> DescribeSendResponse:
        return describe(request, backend)

    def prepare(self, request: PrepareSendRequest, backend: Backend, version: Version) -> PrepareSendResponse:
        """Manifest, plan and rendezvous. What an earlier publication still held is freed.

        Raises Fenced where another version is asked for than the one held, InvalidState for a path unknown here.
        """
        began = time.monotonic()
        publication = PublicationId.from_proto(request.publication)
        if request.path not in (weights_pb2.PATH_GATHER_BROADCAST, weights_pb2.PATH_SHARDED):
            raise InvalidState(f"this trainer knows no path {request.path}.", "publish by PATH_GATHER_BROADCAST.")
        if publication.version != version:
            raise Fenced(f"publication {publication.key} asks for a version that is not held: {version} is.", _FIX)
        self._sharded = request.path == weights_pb2.PATH_SHARDED
        if self._sharded:
            self._close_broadcast()
            return self._shards.prepare(request, backend)
        self.close()
        manifest = backend.manifest(request.dtype)
        world_size = 1 + sum(receiver.world_size for receiver in request.receivers)
        host, store, port = host_address(), None, 0
        if self._rank == 0 and world_size > 1:
            store, port = serve_store(host, world_size, request.deadline_s)
        seconds = time.monotonic() - began
        give_up = began + request.deadline_s
        self._prepared = Prepared(publication, request.dtype, manifest, world_size, give_up, seconds, store)
        self._watchdog = threading.Timer(request.deadline_s, self.abort, ["its deadline has passed"])
        self._watchdog.daemon = True
        self._watchdog.start()
        return PrepareSendResponse(
            manifest=manifest.to_proto(),
            rendezvous=weights_pb2.Rendezvous(host=host, port=port, world_size=world_size),
            plan_hash=gather_broadcast(manifest, world_size).hash,
        )

    def transfer(self, request: TransferSendRequest, backend: Backend, version: Version) -> TransferSendResponse:
        """Gathers on all ranks, sends from rank 0. Raises PublicationFailed on rank 0 where a receiver is gone; the
        ranks are in step then too, and the next publication may follow."""
        publication, prepared = PublicationId.from_proto(request.publication), self._prepared
        if self._sharded and publication.version == version:
            return self._shards.transfer(publication)
        if prepared is None or prepared.publication != publication:
            raise InvalidState(f"publication {publication.key} is not prepared here.", "prepare it first.")
        if publication.version != version:
            raise Fenced(f"publication {publication.key} is late: version {version} is held now.", _FIX)
        sending = self._sending = _Sending(prepared)
        try:
            self._channel = sending.join() if self._rank == 0 else None
            for info, tensor in sending.gathered(backend.export(prepared.dtype)):
                if tensor is not None:
                    sending.send(info, tensor, self._channel)
        except PublicationFailed:
            self.close()
            raise
        report = weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=prepared.manifest.bytes,
            prepare_s=prepared.seconds,
            gather_s=sending.gather_s,
            wire_s=sending.wire_s,
            verify_s=sending.checksum_s,
        )
        return TransferSendResponse(checksums=weights_pb2.Checksums(values=sending.checksums), report=report)

    def abort(self, reason: str) -> None:
        """Makes a transfer in progress fail: before its next tensor, or when the one on the way times out. From any
        thread."""
        self._shards.abort(reason)
        sending, channel = self._sending, self._channel
        if sending is not None:
            log.warning("publication aborted", key=sending.key, reason=reason)
            sending.fail(reason)
        if channel is not None:
            channel.abort()

    def finish(self, *, failed: bool) -> None:
        """After a publication. A sharded one's communicator and slots stay for the next, unless it failed. From any
        thread, not during a transfer."""
        self._close_broadcast()
        self._shards.finish(failed)

    def close(self) -> None:
        """Frees the communicator and what was prepared. From any thread, not during a transfer."""
        self._close_broadcast()
        self._shards.close()

    def _close_broadcast(self) -> None:
        with self._lock:
            channel, self._channel, self._prepared, self._sending = self._channel, None, None, None
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None
        if channel is not None:
            channel.close()


class _Sending:
    """One transfer under way on one rank: the clock, the checksums, and the failure that ends the sending."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._failure: PublicationFailed | None = None
        self.checksums: list[int] = []
        self.gather_s = self.wire_s = self.checksum_s = 0.0

    @property
    def key(self) -> str:
        return self._prepared.publication.key

    def fail(self, reason: str) -> None:
        """Sends nothing more. What the channel says last counts."""
        what = f"publication {self.key} failed: {reason}"
        self._failure = PublicationFailed(what, "publish again with a new attempt.")

    def join(self) -> GlooChannel | None:
        """Meets the receivers. A failure is kept until all is gathered: the other ranks have begun to gather."""
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
        """All of `tensors`, timed; at their end raises what has failed meanwhile."""
        began = time.monotonic()
        for item in tensors:
            self.gather_s += time.monotonic() - began
            yield item
            began = time.monotonic()
        if self._failure is not None:
            raise self._failure

    def send(self, info: TensorInfo, tensor: Tensor, channel: GlooChannel | None) -> None:
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


_FIX = "publish the version that GetStatus names."
