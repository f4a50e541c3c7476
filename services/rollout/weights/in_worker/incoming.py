"""How versions come into a worker: one protocol for a transfer, one for the path that makes transfers.

The implementations are `sharded.py`, `delta.py` and `gather_broadcast.py`. `receiver.py` picks one by the request's
path; nothing else asks which path a transfer takes.
"""

from typing import Protocol

from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Placed, Prepared, Received


class IncomingTransfer(Protocol):
    """One version on its way into one worker. It is begun, waited for and placed, in this order, or closed."""

    def begin(self) -> None:
        """Starts receiving in a thread and returns at once."""

    def wait(self, at_most_s: float | None = None) -> Received | None:
        """Waits for the last byte; None where it is not there in time. Raises PublicationFailed where it will not
        come."""

    def place(self) -> Placed:
        """Puts what was received in place and compares it there. Only while generation is paused."""

    def close(self) -> None:
        """Ends what is under way: nothing is written after this."""


class IncomingPath(Protocol):
    """One path. It keeps from version to version what the next transfer can use."""

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        """Checks a coming transfer, in which this worker has `rank`. Raises PublicationFailed where it does not fit."""

    def transfer(self, request: TransferRequest, rank: int, *, shadow: bool) -> IncomingTransfer:
        """Makes memory ready for a transfer that was prepared: for the whole version with `shadow`, else for a few
        messages at a time. Raises PublicationFailed where there is none."""
