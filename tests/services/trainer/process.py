"""A trainer as its own processes, as it is run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.services.trainer.calls import Calls
from tests.services.trainer.coordinator import ScriptedCoordinator


class TrainerProcess:
    """`python -m services.trainer`, or torchrun with `ranks` of them."""

    def __init__(
        self,
        coordinator: ScriptedCoordinator,
        log: Path,
        ranks: int = 1,
        module: str = "services.trainer",
        **environment: str,
    ) -> None:
        arguments = ["-m", module, "--coordinator", coordinator.address, "--host", "127.0.0.1"]
        if ranks > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            arguments = [*launch, *arguments]
        self._coordinator = coordinator
        self._launched = ranks > 1
        self._pool = ThreadPoolExecutor(4)
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MILLRACE_LOG": "json", **environment},
                cwd=Path(__file__).parents[3],
            )
        self._seen = set(coordinator.script.members)

    def calls(self, timeout_s: float = 180.0) -> Calls:
        """Calls to the trainer, once it has registered."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            new = [m for m in self._coordinator.script.members.values() if m.member_id not in self._seen]
            if new:
                return Calls(new[0].address)
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"the trainer did not register:\n{self.text()}")

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, by rank."""
        if self.process.args[2] != "torch.distributed.run":  # type: ignore[index]
            return [psutil.Process(self.process.pid)]
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def in_background(self, call: Callable[[], Any]) -> "Future[Any]":
        return self._pool.submit(call)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class TwoRanks:
    """A trainer of two ranks that takes job after job."""

    def __init__(self, running: TrainerProcess, served: ScriptedCoordinator) -> None:
        self.running = running
        self.served = served
        self.calls: Calls = running.calls()

    def step(self, number: int, groups: Any, job: str) -> dict[str, float]:
        self.served.script.groups = groups
        return dict(self.calls.step(number, groups, self.served.address, job).metrics)


IMPATIENT = "tests.services.trainer.ranks.impatient"


@contextmanager
def trainer(
    coordinator: ScriptedCoordinator,
    log: Path,
    ranks: int = 1,
    module: str = "services.trainer",
    **environment: str,
) -> Iterator[TrainerProcess]:
    """Stopped at the end, and then nothing of it is left."""
    running = TrainerProcess(coordinator, log, ranks, module, **environment)
    children: list[psutil.Process] = []
    try:
        yield running
        children = (
            psutil.Process(running.process.pid).children(recursive=True) if running.process.poll() is None else []
        )
        running.stop()
    finally:
        for process in [*children, psutil.Process(running.process.pid)] if running.process.poll() is None else children:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        running.process.wait(10)
