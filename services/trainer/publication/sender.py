"""The sender's side of a publication on one rank: what each way to send weights has to do (`OutgoingTransfer`), and
the choice of the one that the request's path names."""

from collections.abc import Mapping
from typing import Protocol

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import Fenced, InvalidState
from millrace.ids import Version
from millrace.weights.phases import PublicationId
from services.trainer.protocol.backend import Backend
from services.trainer.publication import sharded
from services.trainer.publication.gather_broadcast import GatherBroadcastTransfer
from services.trainer.publication.sharded import DeltaTransfer, ShardedTransfer


class OutgoingTransfer(Protocol):
    """One rank's part in sending weights by one path; one object serves all publications by that path.

    `prepare` and `transfer` are collectives: every rank calls them on its main thread. The other methods may be called
    from any thread.
    """

    @property
    def publication(self) -> PublicationId | None:
        """The publication that is prepared; None before `prepare` and after its end."""

    def prepare_send(self, request: pb.PrepareSendRequest, backend: Backend) -> pb.PrepareSendResponse:
        """Makes the plan and the rendezvous, and the buffers of this rank. Frees what an earlier publication held."""

    def transfer(self, request: pb.TransferSendRequest, backend: Backend) -> pb.TransferSendResponse:
        """Sends what is prepared; returns when the last byte is sent. Raises PublicationFailed if a receiver is lost or
        the deadline passes; all ranks are ready for the next publication then. Raises OutOfMemory if the ranks report
        that to each other."""

    def abort(self, reason: str) -> None:
        """Makes a transfer in progress fail."""

    def finish(self, *, failed: bool) -> None:
        """Ends the publication; what the next one can use is kept unless this one failed. Not called during a
        transfer."""

    def close(self) -> None:
        """Frees everything. Not called during a transfer."""


_FIX = "publish the version that GetStatus names."


class Sender:
    """`describe`, `prepare` and `transfer` are collectives on every rank's main thread; only rank 0's answers count.
    The other methods may be called from any thread."""

    def __init__(self, rank: int, member_id: str) -> None:
        self._transfers: Mapping[weights_pb2.Path, OutgoingTransfer] = {
            weights_pb2.PATH_GATHER_BROADCAST: GatherBroadcastTransfer(rank, member_id),
            weights_pb2.PATH_SHARDED: ShardedTransfer(rank, member_id),
            weights_pb2.PATH_DELTA: DeltaTransfer(rank, member_id),
        }
        self._current: OutgoingTransfer | None = None

    def describe(self, request: pb.DescribeSendRequest, backend: Backend) -> pb.DescribeSendResponse:
        """What is published, and which boxes of it each rank holds."""
        return sharded.describe(request, backend)

    def prepare_send(
        self, request: pb.PrepareSendRequest, backend: Backend, version: Version
    ) -> pb.PrepareSendResponse:
        """Manifest, plan and rendezvous; see `OutgoingTransfer.prepare`. `version` is the one that the trainer holds.

        Raises Fenced if the request asks for another version, InvalidState for an unknown path.
        """
        publication = PublicationId.from_proto(request.publication)
        chosen = self._transfers.get(request.path)
        if chosen is None:
            raise InvalidState(f"this trainer knows no path {request.path}.", "publish by PATH_GATHER_BROADCAST.")
        if publication.version != version:
            raise Fenced(f"publication {publication.key} asks for a version that is not held: {version} is.", _FIX)
        for other in self._transfers.values():
            if other is not chosen:
                other.close()
        self._current = chosen
        return chosen.prepare_send(request, backend)

    def transfer(self, request: pb.TransferSendRequest, backend: Backend, version: Version) -> pb.TransferSendResponse:
        """Sends what was prepared; see `OutgoingTransfer.transfer`. Raises InvalidState if the publication is not
        prepared, Fenced if the trainer holds another version by now."""
        publication, current = PublicationId.from_proto(request.publication), self._current
        if current is None or current.publication != publication:
            raise InvalidState(f"publication {publication.key} is not prepared here.", "prepare it first.")
        if publication.version != version:
            raise Fenced(f"publication {publication.key} is late: version {version} is held now.", _FIX)
        sent = current.transfer(request, backend)
        backend.rest()
        return sent

    def abort(self, reason: str) -> None:
        """Makes a transfer in progress fail."""
        if (current := self._current) is not None:
            current.abort(reason)

    def finish(self, *, failed: bool) -> None:
        """Ends the publication; see `OutgoingTransfer.finish`. Not called during a transfer."""
        if (current := self._current) is not None:
            current.finish(failed=failed)

    def close(self) -> None:
        """Frees what every transfer holds. Not called during a transfer."""
        for transfer in self._transfers.values():
            transfer.close()
