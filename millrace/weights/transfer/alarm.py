"""An alarm that every rank of a publication hears: who fails tells the others, and nobody waits for a dead one."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

LISTEN_EVERY_S = 0.1
RINGS_S = 0.5
"""How long whoever rings waits until the others can hear it: a store whose host stands still answers never."""
_KEY = "alarm"


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of a store, for alarms alone: one that waits for something else keeps others from using it."""
    limit = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


class Alarm:
    """One rank's end, in the store where publication `key` meets. `on_alarm` is called once, with the reason, from a
    thread of the alarm's; not for an alarm that this end rang."""

    def __init__(self, store: TCPStore, key: str, on_alarm: Callable[[str], None]) -> None:
        self._store: Any = store  # torch's stubs know no bytes
        self._key = f"{_KEY}/{key}"
        self._on_alarm = on_alarm
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"alarm {key}", daemon=True)
        self._thread.start()

    def ring(self, reason: str) -> None:
        """Tells everybody, unless there is nobody left to tell it."""
        self._over.set()
        ringing = threading.Thread(target=self._tell, args=(reason,), name=f"ring {self._key}", daemon=True)
        ringing.start()
        ringing.join(RINGS_S)

    def _tell(self, reason: str) -> None:
        try:
            with self._lock:
                if not self._store.check([self._key]):
                    self._store.set(self._key, reason)
        except RuntimeError:  # the store is gone, and with it whoever served it: the others see that for themselves
            return

    def stop(self) -> None:
        self._over.set()

    def _listen(self) -> None:
        while not self._over.wait(LISTEN_EVERY_S):
            try:
                with self._lock:
                    if not self._store.check([self._key]):
                        continue
                    reason = self._store.get(self._key).decode()
            except RuntimeError as error:
                reason = f"the store of the publication is gone: {error}"
            if not self._over.is_set():
                self._over.set()
                self._on_alarm(reason)
