"""Two coordinators on one Redis, of which one leads."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from millrace.client import Client
from tests.services.coordinator.cluster import until
from tests.services.coordinator.conftest import CoordinatorProcess


class Pair:
    """What members and people see of both. `leader` and `other` change places with `changed`."""

    def __init__(
        self, folder: Path, redis_url: str, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.processes = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            told = {"REDIS_URL": redis_url, **(environment or {})}
            self.processes.append(CoordinatorProcess(folder / name, *options, environment=told))
        self.leader, self.other = self.processes
        self.address = ",".join(process.address for process in self.processes)
        self.client = Client(",".join(process.client.url for process in self.processes), token="", patience_s=20.0)

    def __enter__(self) -> Self:
        self.leader.start()
        self.other.start("/healthz")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        for process in self.processes:
            if error is not None:
                print(f"--- {process.folder.name}\n{process.log()[-6000:]}")
            if process.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.process.send_signal(signal.SIGCONT)
            process.end()

    def strike(self, how: signal.Signals) -> None:
        """Kills or stops the leader."""
        assert self.leader.process is not None
        os.kill(self.leader.process.pid, how)

    async def changed(self, since: float, within_s: float = 120.0) -> float:
        """Waits until the other one leads; answers the seconds since `since`, in time.monotonic()."""
        await until(lambda: asyncio.to_thread(self.other.says, "/readyz"), within_s=within_s)
        self.leader, self.other = self.other, self.leader
        return time.monotonic() - since


@contextlib.contextmanager
def pair(folder: Path, redis_url: str, *options: str) -> Iterator[Pair]:
    with Pair(folder, redis_url, *options) as both:
        yield both
