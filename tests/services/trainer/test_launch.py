"""The launcher: ranks that fail are all started again, from a process that has imported what they need."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.trainer.launch import PRELOADED
from tests.processes import runs
from tests.services.trainer.calls import Calls
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec

pytestmark = pytest.mark.slow

WITHIN_S = 120.0


def with_torchao(folder: Path) -> dict[str, str]:
    """Variables of a process that ends if it imports torchao. That starts CUDA when it is imported, and is installed
    where SGLang is."""
    (folder / "torchao").mkdir()
    (folder / "torchao" / "__init__.py").write_text("raise SystemExit('torchao was imported')")
    (folder / "torchao-0.17.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchao\nVersion: 0.17.0\n"
    (folder / "torchao-0.17.0.dist-info" / "METADATA").write_text(metadata)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    # OpenBLAS starts a thread of its own, and starts it anew after a fork.
    return {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


class Launched:
    """A trainer of two ranks by its command."""

    def __init__(self, served: ScriptedCoordinator, log: Path) -> None:
        self.served, self.log = served, log
        argv = (sys.executable, "-m", "services.trainer.launch", "--ranks", "2", "--coordinator", served.address)
        environment = {**os.environ, **with_torchao(log.parent), "MILLRACE_LOG": "json"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                (*argv, "--host", "127.0.0.1"), stdout=output, stderr=output, env=environment
            )

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S:g} s\n{self.log.read_text()}"
            time.sleep(0.02)

    def registered(self, times: int) -> None:
        self.until("the trainer is registered", lambda: self.served.script.registrations >= times)

    def ranks(self) -> list[psutil.Process]:
        """The processes that were forked, the oldest first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            ranks = [p for p in below if p.ppid() != self.process.pid and runs(p)]
            return sorted(ranks, key=lambda process: process.pid)
        return []

    def end(self) -> None:
        left = self.ranks()
        self.process.kill()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60)


@pytest.fixture
def launched(served: ScriptedCoordinator, tmp_path: Path) -> Iterator[Launched]:
    running = Launched(served, tmp_path / "log")
    try:
        yield running
    finally:
        running.end()


def test_ranks_are_started_again_and_drained(launched: Launched, tied_model: Path) -> None:
    launched.registered(1)
    (first,) = launched.served.script.members.values()
    Calls(first.address).configure(job_spec(tied_model))
    before = launched.ranks()
    assert psutil.Process(before[0].ppid()).num_threads() == 1, "a forked process has none of its parent's threads"
    before[1].send_signal(signal.SIGSEGV)
    launched.registered(2)
    second = list(launched.served.script.members.values())[1]
    assert second.member_id != first.member_id
    assert second.address == first.address, "by which the coordinator knows at once that the first one is gone"
    assert not any(rank.is_running() for rank in before), "a trainer is all of its ranks"
    assert f"rank 1 (pid {before[1].pid}) was ended by SIGSEGV" in launched.log.read_text()
    assert Calls(second.address).configure(job_spec(tied_model)).world_size == 2
    launched.ranks()[1].terminate()
    launched.registered(3)
    third = list(launched.served.script.members.values())[-1]
    assert [leave.member_id for leave in launched.served.script.left] == [second.member_id], "it has drained"
    left = launched.ranks()
    launched.process.terminate()
    assert launched.process.wait(WITHIN_S) == 0
    assert not psutil.wait_procs(left, timeout=60)[1]
    assert [leave.member_id for leave in launched.served.script.left] == [second.member_id, third.member_id]


@pytest.mark.matrix  # tests/services/rollout/test_launch.py has a replica without its launcher
def test_ranks_without_their_launcher_drain(launched: Launched) -> None:
    launched.registered(1)
    left = launched.ranks()
    launched.process.kill()
    launched.until("the trainer has left", lambda: bool(launched.served.script.left))
    assert not psutil.wait_procs(left, timeout=60)[1]


@pytest.mark.matrix  # tests/local/test_launcher.py has it with a process of its own
def test_the_process_that_forks_is_started_again_too(launched: Launched) -> None:
    launched.registered(1)
    before = launched.ranks()
    psutil.Process(before[0].ppid()).kill()
    launched.registered(2)
    assert not any(rank.is_running() for rank in before)
    assert len(launched.ranks()) == 2
    launched.served.script.drain = True
    assert launched.process.wait(WITHIN_S) == 0
    assert launched.served.script.registrations == 2, "what was drained is not started again"


@pytest.mark.matrix  # tests/local/test_launcher.py has it with a process of its own
def test_ranks_that_keep_failing_end_the_trainer(launched: Launched) -> None:
    seen: set[int] = set()
    while launched.process.poll() is None:
        fresh = [rank for rank in launched.ranks() if rank.pid not in seen]
        seen |= {rank.pid for rank in fresh}
        for rank in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        time.sleep(0.02)
    assert launched.process.returncode == 1
    assert "ended too often" in launched.log.read_text()


@pytest.mark.matrix  # test_ranks_are_started_again_and_drained sees the threads, and that torchao is not imported
def test_what_is_imported_before_the_fork_starts_no_thread_and_no_cuda(tmp_path: Path) -> None:
    """A forked process has none of its parent's threads, and CUDA does not work in one whose parent has used it."""
    code = (
        f"import importlib, torch\nfor name in {PRELOADED}: importlib.import_module(name)\n"
        "import os; print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= with_torchao(tmp_path)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert told.stdout.split() == ["1", "False"]
