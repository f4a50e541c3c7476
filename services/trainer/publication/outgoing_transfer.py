"""What the trainer's ranks need of a way to send weights. Each way is one implementation of `OutgoingTransfer`."""

from typing import Protocol

from millrace.contracts.v1.trainer_pb2 import (
    PrepareSendRequest,
    PrepareSendResponse,
    TransferSendRequest,
    TransferSendResponse,
)
from millrace.weights.phases import PublicationId
from services.trainer.protocol.backend import Backend


class OutgoingTransfer(Protocol):
    """One rank's part in sending weights by one path; one object serves all publications by that path.

    `prepare` and `transfer` are collectives: every rank calls them on its main thread. The other methods may be called
    from any thread.
    """

    @property
    def publication(self) -> PublicationId | None:
        """The publication that is prepared; None before `prepare` and after its end."""

    def prepare_send(self, request: PrepareSendRequest, backend: Backend) -> PrepareSendResponse:
        """Makes the plan and the rendezvous, and the buffers of this rank. Frees what an earlier publication held."""

    def transfer(self, request: TransferSendRequest, backend: Backend) -> TransferSendResponse:
        """Sends what is prepared; returns when the last byte is sent. Raises PublicationFailed where a receiver is
        lost or the deadline passes; all ranks are ready for the next publication then. Raises OutOfMemory where ranks
        tell each other of that."""

    def abort(self, reason: str) -> None:
        """Makes a transfer in progress fail."""

    def finish(self, *, failed: bool) -> None:
        """Ends the publication; what the next one can use is kept unless this one failed. Not called during a
        transfer."""

    def close(self) -> None:
        """Frees everything. Not called during a transfer."""
