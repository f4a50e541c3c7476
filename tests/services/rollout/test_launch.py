"""The launcher: a replica that ends is started again, from a process that has imported what it needs."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from millrace.wire.channel import Peer
from tests.models import save_tiny_model
from tests.processes import runs
from tests.services.rollout.coordinator import Coordinator, configure, until
from tests.services.rollout.jobs import job_spec

pytestmark = pytest.mark.slow

WITHIN_S = 120.0


class Launched:
    """A replica by its launcher, and the coordinator that it belongs to."""

    def __init__(self, coordinator: Coordinator, process: asyncio.subprocess.Process, log: Path) -> None:
        self.coordinator, self.process, self.log = coordinator, process, log

    async def registered(self, times: int) -> psutil.Process:
        """The replica's process, once so many have registered."""
        await until(lambda: len(self.coordinator.registrations) >= times, WITHIN_S)
        return self.forked[0]

    @property
    def forked(self) -> list[psutil.Process]:
        """The processes that were forked, the oldest first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = [p for child in psutil.Process(self.process.pid).children() for p in child.children()]
            alive = [process for process in below if runs(process)]
            return sorted(alive, key=lambda process: process.pid)
        return []

    @property
    def forking(self) -> psutil.Process:
        """The process that forks."""
        (parent,) = {process.ppid() for process in self.forked}
        return psutil.Process(parent)

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in self.coordinator.members.values()]

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WITHIN_S)


@asynccontextmanager
async def launched(folder: Path, engine: str = "transformers") -> AsyncIterator[Launched]:
    coordinator = Coordinator()
    argv = ("-m", "services.rollout.launch", "--coordinator", await coordinator.start(), "--engine", engine)
    log = folder / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(*argv, "--host", "127.0.0.1"),
            stdout=output,
            stderr=output,
            # OpenBLAS starts threads of its own, and starts them anew after a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    running = Launched(coordinator, process, log)
    try:
        yield running
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await coordinator.stop()


def run(folder: Path, scenario: Callable[[Launched], Awaitable[None]], engine: str = "transformers") -> str:
    """The log of a scenario."""

    async def whole() -> None:
        async with launched(folder, engine) as running:
            try:
                await scenario(running)
            except BaseException:
                print(running.log.read_text())
                raise

    asyncio.run(whole())
    return (folder / "log").read_text()


@pytest.mark.matrix  # test_vllm_is_imported_once and tests/services/trainer/test_launch.py
def test_a_replica_is_started_again_until_it_is_drained(tmp_path: Path) -> None:
    """Also where somebody else sent it SIGTERM, with which it ends in order."""

    async def scenario(running: Launched) -> None:
        first = await running.registered(1)
        assert running.forking.num_threads() == 1, "a forked process has none of its parent's threads"
        first.kill()
        second = await running.registered(2)
        assert not first.is_running() and second.pid != first.pid
        assert len(running.coordinator.members) == 2, "another member"
        assert len(set(running.addresses)) == 1, "by which the coordinator knows at once that the first one is gone"
        second.terminate()
        third = await running.registered(3)
        running.coordinator.draining.add(running.coordinator.registrations[-1])
        assert await running.ended() == 0
        assert not third.is_running()

    told = run(tmp_path, scenario)
    assert "was ended by SIGKILL" in told and "in order" in told


def test_vllm_is_imported_once(tmp_path: Path) -> None:
    """Its processes are forked as the replica is, and none outlives the replica, nor the replica its launcher."""
    spec = job_spec(save_tiny_model(tmp_path / "model", tied=True), engine="vllm")

    async def engine_of(running: Launched, times: int) -> list[psutil.Process]:
        replica = await running.registered(times)
        peer = Peer(running.addresses[-1])
        await configure(peer, spec)
        await peer.close()
        engine = [process for process in running.forked if process.pid != replica.pid]
        assert len(engine) == 2, "the core and its worker"
        return engine

    async def scenario(running: Launched) -> None:
        engine = await engine_of(running, 1)
        assert running.forking.num_threads() == 1
        running.forked[0].kill()
        assert not (await asyncio.to_thread(psutil.wait_procs, engine, 20))[1]
        await running.registered(2)
        left = [*running.forked, running.forking]
        running.process.terminate()
        assert await running.ended() == 0
        assert running.coordinator.left and not (await asyncio.to_thread(psutil.wait_procs, left, 20))[1]

    run(tmp_path, scenario, "vllm")


@pytest.mark.matrix  # tests/services/trainer/test_launch.py has ranks without their launcher
def test_a_replica_without_its_launcher_drains(tmp_path: Path) -> None:
    async def scenario(running: Launched) -> None:
        left = [await running.registered(1), running.forking]
        running.process.kill()
        await until(lambda: running.coordinator.left, WITHIN_S)
        assert not (await asyncio.to_thread(psutil.wait_procs, left, 20))[1]

    run(tmp_path, scenario)
