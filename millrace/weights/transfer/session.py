"""One rank in a publication under way: its channel, kept from version to version; the alarm; the deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
from torch.distributed import TCPStore

from millrace.errors import PublicationFailed
from millrace.weights.transfer.alarm import Alarm, connect
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous, apart, join

log = structlog.get_logger(__name__)
Result = TypeVar("Result")
CALL_S = 10.0
"""Longest that a store of a publication is looked for."""


class PublicationSession:
    """What a rank does with the others, such that it never waits longer than the deadline, nor for the dead.

    `run` blocks and is called from one thread at a time; `fail` frees it from any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._alarm: Alarm | None = None
        self._store: tuple[str, int, TCPStore] | None = None
        """Where alarms are heard, kept as long as the communicator."""
        self._failure: PublicationFailed | None = None

    @property
    def key(self) -> str:
        """Of the communicator that this rank is in; empty where it is in none, or in one that failed."""
        channel = self._channel
        return channel.key if channel is not None and channel.broken is None else ""

    def begin(self) -> None:
        """Forgets an earlier failure. Before `run`, so that a `fail` in between counts."""
        self._failure = None

    def run(
        self, rendezvous: Rendezvous, publication: str, give_up: float, work: Callable[[Channel], Result]
    ) -> Result:
        """Joins, unless it is in that communicator already, and does the work. What fails fails for all ranks.

        `give_up` is of time.monotonic(). Raises PublicationFailed.
        """
        watchdog = threading.Timer(max(0.0, give_up - time.monotonic()), self.fail, ["its deadline has passed"])
        watchdog.daemon = True
        watchdog.start()
        try:
            self._raise_failure()
            if self.key != rendezvous.key:
                self.leave()
            self._alarm = Alarm(self._store_of(rendezvous), publication, self._heard)
            if (channel := self._channel) is None:
                channel = self._channel = join(rendezvous, self._why)
            channel.give_up = give_up
            self._raise_failure()
            result = work(channel)
            self._raise_failure()
            return result
        except (PublicationFailed, RuntimeError, ValueError) as error:
            failed = error if isinstance(error, PublicationFailed) else None
            reason = f"rank {rendezvous.rank}: {failed.what if failed else error}"
            first = self._failure
            self.fail(reason, ring=first is None)
            self.leave()
            if first is None and failed is not None:
                raise
            told = first.again() if first else PublicationFailed(f"publication {publication} failed at {reason}")
            raise told from error
        finally:
            watchdog.cancel()
            if self._alarm is not None:
                self._alarm.stop()
                self._alarm = None

    def fail(self, reason: str, *, ring: bool = True) -> None:
        """Ends what is under way here, and tells the others."""
        with self._lock:
            if self._failure is None:
                fix = "the members that died are cut out and the publication is repeated."
                self._failure = PublicationFailed(f"the publication failed: {reason}", fix)
            channel, alarm = self._channel, self._alarm
        if alarm is not None and ring:
            alarm.ring(reason)
        if channel is not None:
            channel.abort(reason)

    def _store_of(self, rendezvous: Rendezvous) -> TCPStore:
        if self._store is None or self._store[:2] != (rendezvous.host, rendezvous.port):
            host, port, limit_s = rendezvous.host, rendezvous.port, min(CALL_S, rendezvous.timeout_s)
            what = f"the store of communicator {rendezvous.key} at {host}:{port}"
            store = apart(what, lambda: connect(host, port, limit_s), self._why)
            self._store = (host, port, store)
        return self._store[2]

    def leave(self) -> None:
        """Closes the channel. Not while `run` works."""
        channel, self._channel, self._store = self._channel, None, None
        if channel is not None:
            channel.close()

    def _heard(self, reason: str) -> None:
        log.warning("the publication fails elsewhere", reason=reason)
        self.fail(reason, ring=False)

    def _why(self) -> PublicationFailed | None:
        return self._failure.again() if self._failure is not None else None

    def _raise_failure(self) -> None:
        if (failure := self._why()) is not None:
            raise failure
