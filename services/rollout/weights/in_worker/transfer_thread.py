"""One rank's share of a transfer over a publication session, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.session import PublicationSession
from services.rollout.weights.transfer_request import TransferRequest

Result = TypeVar("Result")


class TransferThread(Generic[Result]):
    """Runs `work` on the session's channel, from `begin` on; its deadline counts from here."""

    def __init__(
        self,
        request: TransferRequest,
        rank: int,
        work: Callable[[Channel], Result],
        device: torch.device,
        session: PublicationSession,
    ) -> None:
        """`device` holds the memory that `work` reads or writes."""
        self.request = request
        self.failure: PublicationFailed | None = None
        self._result: Result | None = None
        self._work = work
        self._session = session
        self._rendezvous = Rendezvous(
            request.host,
            request.port,
            request.communicator,
            rank,
            request.world_size,
            request.nccl_id,
            device,
            request.timeout_s,
        )
        self._deadline = time.monotonic() + request.timeout_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        session.begin()

    def begin(self) -> None:
        """Starts the thread and returns at once."""
        self._thread = threading.Thread(target=self._run, name=f"transfer {self.request.key}", daemon=True)
        self._thread.start()

    def wait(self, at_most_s: float | None = None) -> Result | None:
        """The work's result; None if it is not there in time. Raises PublicationFailed if the work failed."""
        if not self._over.wait(at_most_s):
            return None
        if self.failure is not None:
            raise self.failure.again()
        return self._result

    def close(self) -> None:
        """Ends the work if it is under way; returns when it reads and writes nothing any more."""
        if not self._over.is_set():
            self.failure = self.failure or self.request.aborted()
            if self._thread is not None:  # otherwise nothing began, and the communicator can still be used
                self._session.fail("a replica was told to abort")
                self._thread.join()
            self._over.set()

    def _run(self) -> None:
        try:
            self._result = self._session.run(self._rendezvous, self.request.key, self._deadline, self._work)
        except PublicationFailed as error:
            # A new one: an exception that was raised keeps the memory of the frames that it left.
            self.failure = self.failure or error.again()
        finally:
            if self.request.leave_after:
                self._session.leave()
            self._over.set()
