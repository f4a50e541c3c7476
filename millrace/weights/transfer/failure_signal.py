"""A signal by which one rank tells all ranks of a publication that it failed, so that none waits for a dead rank."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

POLL_EVERY_S = 0.1
SEND_S = 0.5
"""How long a failing rank waits for its signal to be stored: a store on a host that hangs never answers."""
_KEY = "alarm"


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store at `host`:`port`, for failure signals only: a client that waits for another key blocks all
    other calls on it. Raises RuntimeError where the store does not answer within `timeout_s`."""
    limit = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


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
        """Tells all other ranks; does nothing where the store is lost. Returns after at most SEND_S."""
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
