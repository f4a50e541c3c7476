"""A trainer as its own processes, as it is run."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.forked import Forked
from tests.processes import runs
from tests.services.trainer.calls import Calls
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.forked_ranks import ForkedRanks


class TrainerProcess:
    """A trainer of `ranks` ranks: forked, or, `by_command`, as people start it: `python -m services.trainer`, and
    torchrun for several ranks."""

    def __init__(
        self,
        coordinator: ScriptedCoordinator,
        log: Path,
        ranks: int = 1,
        module: str = "services.trainer",
        by_command: bool = False,
        **environment: str,
    ) -> None:
        arguments = ("--coordinator", coordinator.address, "--host", "127.0.0.1")
        environment = {"OMP_NUM_THREADS": "1", "MILLRACE_LOG": "json", **environment}
        self._coordinator = coordinator
        self._pool = ThreadPoolExecutor(4)
        self._seen = set(coordinator.script.members)
        self.log = log
        self._forked: ForkedRanks | None = None
        self.process: Forked | subprocess.Popen[bytes]
        """Rank 0, or torchrun."""
        if by_command:
            self.process = _command(module, arguments, environment, log, ranks)
        else:
            self._forked = ForkedRanks(module, arguments, environment, [log] * ranks)
            self.process = self._forked.processes[0]

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
        if self._forked is not None:
            return [psutil.Process(rank.pid) for rank in self._forked.processes]
        children = psutil.Process(self.process.pid).children()
        ranks = [child for child in children if "RANK" in child.environ()]
        return sorted(ranks, key=lambda child: int(child.environ()["RANK"])) or [psutil.Process(self.process.pid)]

    def in_background(self, call: Callable[[], Any]) -> "Future[Any]":
        return self._pool.submit(call)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def tree(self) -> list[psutil.Process]:
        """Every process of it that runs."""
        tops = [self.process.pid] if self._forked is None else [rank.pid for rank in self._forked.processes]
        found = []
        for pid in tops:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return found


def _command(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, ranks: int
) -> subprocess.Popen[bytes]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *launch, "-m", module, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=Path(__file__).parents[3],
        )


class TwoRanks:
    """A trainer of two ranks that takes job after job."""

    def __init__(self, running: TrainerProcess, served: ScriptedCoordinator) -> None:
        self.running = running
        self.served = served
        self.calls: Calls = running.calls()

    def step(self, number: int, groups: Any, job: str, sizes: Sequence[int] = ()) -> dict[str, float]:
        """`sizes`: groups of each part of the step; empty for one part."""
        self.served.script.groups = groups
        return dict(self.calls.step(number, groups, self.served.address, job, sizes=sizes).metrics)


IMPATIENT = {"MILLRACE_SILENT_S": "9"}
"""Environment of a trainer to which a silent rank is dead sooner, for tests that wait for that."""


@contextmanager
def trainer(
    coordinator: ScriptedCoordinator,
    log: Path,
    ranks: int = 1,
    module: str = "services.trainer",
    by_command: bool = False,
    **environment: str,
) -> Iterator[TrainerProcess]:
    """Stopped at the end, and then nothing of it is left."""
    running = TrainerProcess(coordinator, log, ranks, module, by_command, **environment)
    left: list[psutil.Process] = []
    try:
        yield running
        left = running.tree()
        running.stop()
    finally:
        for process in {*left, *running.tree()}:
            if runs(process):
                process.kill()
        running.process.wait(60)
