"""One rank's part in publications: its channel, which is kept from version to version, its failure signal, its
deadline."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from torch.distributed import TCPStore

from millrace.errors import OutOfMemory, PublicationFailed
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous, interruptible, join
from millrace.weights.transfer.store import connect_store

log = structlog.get_logger(__name__)
Result = TypeVar("Result")
CONNECT_S = 10.0
"""Longest time to connect to the store of a publication."""


class PublicationSession:
    """Runs one rank's share of a transfer so that it never waits past the deadline, nor for a dead rank.

    `run` blocks and is called from one thread at a time. `fail` may be called from any thread and ends it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._failure_signal: FailureSignal | None = None
        self._store: tuple[str, int, TCPStore] | None = None
        """Host, port and client of the store that carries failure signals; kept as long as the communicator."""
        self._failure: PublicationFailed | None = None

    @property
    def key(self) -> str:
        """Key of the communicator that this rank is in; empty if it is in none, or in one that failed."""
        channel = self._channel
        return channel.key if channel is not None and channel.failure is None else ""

    def begin(self) -> None:
        """Forgets an earlier failure. Called before `run`, so that a `fail` in between counts."""
        self._failure = None

    def run(
        self, rendezvous: Rendezvous, publication: str, deadline: float, work: Callable[[Channel], Result]
    ) -> Result:
        """Joins the communicator, unless this rank is in it already, and does `work` on its channel. A failure here
        fails all ranks.

        `deadline` is a time of time.monotonic(). Raises PublicationFailed, and OutOfMemory if `work` does before
        anything else has failed.
        """
        watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), self.fail, ["its deadline has passed"])
        watchdog.daemon = True
        watchdog.start()
        try:
            self._raise_failure()
            if self.key != rendezvous.key:
                self.leave()
            self._failure_signal = FailureSignal(self._signal_store(rendezvous), publication, self._failed_elsewhere)
            if (channel := self._channel) is None:
                channel = self._channel = join(rendezvous, self._new_failure)
            channel.deadline = deadline
            self._raise_failure()
            result = work(channel)
            self._raise_failure()
            return result
        except Exception as error:
            if (failure := self._failure_of(error, rendezvous.rank, publication)) is error:
                raise
            raise failure from error
        finally:
            watchdog.cancel()
            if self._failure_signal is not None:
                self._failure_signal.stop()
                self._failure_signal = None

    def _failure_of(self, error: Exception, rank: int, publication: str) -> PublicationFailed | OutOfMemory:
        """Ends the session for `error`, and signals the other ranks unless they know. Returns what `run` raises."""
        failed = error if isinstance(error, PublicationFailed | OutOfMemory) else None
        if not isinstance(error, PublicationFailed | OutOfMemory | RuntimeError | ValueError):
            log.error("a transfer ended with an error that nobody expects", exc_info=error)
        reason = f"rank {rank}: {failed.what if failed else _message(error)}"
        first = self._failure
        self.fail(reason, tell_others=first is None)
        self.leave()
        if first is not None:
            return first.again()
        return failed or PublicationFailed(f"publication {publication} failed at {reason}")

    def fail(self, reason: str, *, tell_others: bool = True) -> None:
        """Ends a `run` in progress, which then raises."""
        with self._lock:
            if self._failure is None:
                fix = "the members that died are cut out and the publication is repeated."
                self._failure = PublicationFailed(f"the publication failed: {reason}", fix)
            channel, failure_signal = self._channel, self._failure_signal
        if failure_signal is not None and tell_others:
            failure_signal.send(reason)
        if channel is not None:
            channel.abort(reason)

    def _signal_store(self, rendezvous: Rendezvous) -> TCPStore:
        if self._store is None or self._store[:2] != (rendezvous.host, rendezvous.port):
            host, port, limit_s = rendezvous.host, rendezvous.port, min(CONNECT_S, rendezvous.timeout_s)
            what = f"the store of communicator {rendezvous.key} at {host}:{port}"
            store = interruptible(what, lambda: connect_store(host, port, limit_s), self._new_failure)
            self._store = (host, port, store)
        return self._store[2]

    def leave(self) -> None:
        """Closes the channel. Not called during `run`."""
        channel, self._channel, self._store = self._channel, None, None
        if channel is not None:
            channel.close()

    def _failed_elsewhere(self, reason: str) -> None:
        log.warning("the publication failed on another rank", reason=reason)
        self.fail(reason, tell_others=False)

    def _new_failure(self) -> PublicationFailed | None:
        """The failure as an error that has not been raised yet."""
        return self._failure.again() if self._failure is not None else None

    def _raise_failure(self) -> None:
        if (failure := self._new_failure()) is not None:
            raise failure


def _message(error: Exception) -> str:
    """Returns the error's message. Unexpected errors also include their type."""
    return str(error) if isinstance(error, RuntimeError | ValueError) else repr(error)


POLL_EVERY_S = 0.1
SEND_S = 0.5
"""How long a failing rank waits for its signal to be stored: a store on a host that hangs never answers."""
_KEY = "alarm"


class FailureSignal:
    """One rank's end of the signal of publication `key`.

    `on_failure` is called once, with the reason, from a thread of this object, when another rank sends the signal or
    the store is lost. It is not called for a signal that this rank sent.
    """

    def __init__(self, store: TCPStore, key: str, on_failure: Callable[[str], None]) -> None:
        self._store: Any = store  # torch's stubs lack the methods on bytes
        self._key = f"{_KEY}/{key}"
        self._on_failure = on_failure
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"failure signal {key}", daemon=True)
        self._thread.start()

    def send(self, reason: str) -> None:
        """Tells all other ranks; does nothing if the store is lost. Returns after at most SEND_S."""
        self._stopped.set()
        sending = threading.Thread(target=self._store_reason, args=(reason,), name=f"send {self._key}", daemon=True)
        sending.start()
        sending.join(SEND_S)

    def _store_reason(self, reason: str) -> None:
        try:
            with self._lock:
                if not self._store.check([self._key]):
                    self._store.set(self._key, reason)
        except RuntimeError:  # the store is lost, and so is the rank that served it: the others notice that themselves
            return

    def stop(self) -> None:
        """Ends the listening thread; `on_failure` is not called any more."""
        self._stopped.set()

    def _listen(self) -> None:
        while not self._stopped.wait(POLL_EVERY_S):
            try:
                with self._lock:
                    if not self._store.check([self._key]):
                        continue
                    reason = self._store.get(self._key).decode()
            except RuntimeError as error:
                reason = f"the store of the publication is lost: {error}"
            if not self._stopped.is_set():
                self._stopped.set()
                self._on_failure(reason)
