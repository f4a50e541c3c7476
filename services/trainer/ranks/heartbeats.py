"""Heartbeats of the ranks: each rank writes its own to the store of commands, from a separate thread."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import structlog
from torch.distributed import DistError, TCPStore

from services.trainer.ranks.world import World

log = structlog.get_logger(__name__)

EVERY_S = 1.0
SILENT_S = 15.0
"""A rank that has not beaten for so long is dead or stopped."""
LEAVE_S = 5.0


class Heartbeats:
    """Writes this rank's heartbeat; on rank 0 also reads the others'.

    A rank that cannot reach rank 0 ends its process at once: its main thread may be blocked in a collective for ever.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.connect(timeout_s=SILENT_S)
        self._store.set(f"host/{world.rank}", f"{world.host} (pid {os.getpid()})")
        self._hosts: dict[int, str] = {}
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._wants_drain = False
        self._told = False
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self, on_drain: Callable[[], None]) -> None:
        """Starts the heartbeats. `on_drain` is called on rank 0, once, when another rank asks to drain."""
        self._on_drain = on_drain
        self._thread.start()

    def drain(self) -> None:
        """Asks rank 0 to drain the trainer, with the next beat. Safe in a signal handler."""
        self._wants_drain = True

    def silent(self) -> dict[int, float]:
        """Ranks that are dead or stopped, and for how many seconds nothing was heard of them."""
        now = time.monotonic()
        heard = {rank: now - at for rank, (_, at) in self._heard.items()}
        return {rank: seconds for rank, seconds in heard.items() if seconds > SILENT_S}

    def host(self, rank: int) -> str:
        """Where a rank runs: host and process id, for people."""
        return self._hosts.get(rank, "an unknown host")

    def stop(self) -> None:
        """Ends the heartbeats. Rank 0, which serves the store, waits for the others to end theirs."""
        self._stopped.set()
        self._thread.join()
        self._store.set(f"left/{self._world.rank}", "")
        if self._world.rank == 0:
            with contextlib.suppress(DistError):
                self._store.wait([f"left/{rank}" for rank in range(self._world.size)], timedelta(seconds=LEAVE_S))

    def _run(self) -> None:
        number = 0
        try:
            while not self._stopped.wait(EVERY_S):
                number += 1
                self._store.set(f"beat/{self._world.rank}", f"{number}{'d' if self._orphaned_or_told() else ''}")
                if self._world.rank == 0:
                    self._listen(self._store)
        except DistError as error:
            log.error("rank 0 is gone: this rank ends", rank=self._world.rank, error=str(error))
            os._exit(1)

    def _listen(self, store: TCPStore) -> None:
        now = time.monotonic()
        for rank in range(self._world.size):
            if rank not in self._hosts and store.check([f"host/{rank}"]):
                self._hosts[rank] = store.get(f"host/{rank}").decode()
            beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
            if beat != self._heard.get(rank, (None, 0.0))[0]:
                self._heard[rank] = (beat, now)
            if beat.endswith(b"d") and not self._told:
                self._told = True
                self._on_drain()

    def _orphaned_or_told(self) -> bool:
        """torchrun that was killed does not take its ranks along."""
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent
        return self._wants_drain or orphaned
