"""The replica as a process: how it starts, what it refuses, how it ends, and that nothing is left of it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from millrace.contracts.v1 import fleet_pb2
from millrace.spec import JobSpec
from millrace.telemetry.metrics.declaration import Owner
from millrace.wire.channel import Peer
from tests.deploy.expressions import without_data
from tests.forked import Forked
from tests.models import random_model
from tests.processes import runs
from tests.sender import export
from tests.services.rollout.coordinator import JOB, Coordinator, configure, publish, until
from tests.services.rollout.jobs import job_spec
from tests.telemetry.metrics.pages import page_with, value

pytestmark = pytest.mark.slow


def command(coordinator: str, *arguments: str, engine: str = "transformers") -> list[str]:
    fixed = ("--coordinator", coordinator, "--engine", engine, "--host", "127.0.0.1")
    return [sys.executable, "-m", "services.rollout", *fixed, *arguments]


def refused(log: Path, *arguments: str, engine: str = "transformers") -> str:
    """What a replica says that exits with 1 by itself."""
    _, _, module, *options = command("127.0.0.1:1", *arguments, engine=engine)
    process = Forked(module, options, os.environ, log)
    assert process.wait(60) == 1, log.read_text()
    return log.read_text()


@dataclass
class Running:
    coordinator: Coordinator
    process: Forked
    peer: Peer

    @property
    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def serve(self, spec: JobSpec) -> None:
        (member_id,) = self.coordinator.members
        await configure(self.peer, spec)
        await publish(self.peer, member_id, export(random_model(tied=True, seed=1)), 1)

    async def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@asynccontextmanager
async def running(log: Path, *arguments: str, engine: str = "transformers") -> AsyncIterator[Running]:
    coordinator = Coordinator()
    _, _, module, *options = command(await coordinator.start(), *arguments, engine=engine)
    process = Forked(module, options, os.environ, log)
    try:
        await until(lambda: coordinator.beats, 60)
        peer = Peer(next(iter(coordinator.members.values())).address)
        yield Running(coordinator, process, peer)
        await peer.close()
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        await coordinator.stop()


def test_another_protocol_version_is_told_and_ends_it() -> None:
    async def scenario() -> tuple[int | None, str]:
        coordinator = Coordinator(protocol_version=99)
        address = await coordinator.start()
        process = await asyncio.create_subprocess_exec(*command(address), stderr=subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), 60)
        await coordinator.stop()
        return process.returncode, said.decode()

    status, said = asyncio.run(scenario())
    assert status == 1
    assert "speaks protocol 1, this coordinator 99" in said
    assert "run the same release of millrace everywhere" in said


def test_what_cannot_work_is_told_and_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told = refused(log, engine="tgi")
    assert '--engine: "tgi": there is no such engine. Fix: choose one of sglang, transformers, vllm' in told
    assert "no token is set, and other hosts can reach 0.0.0.0" in refused(log, "--host", "10.0.0.1")
    assert "the coordinator has not answered for" in refused(log, "--patience-s", "0.5")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(log, "--port", str(port))


WITH_A_STUCK_THREAD = """
import asyncio, threading
from services.rollout import __main__, process as replica

async def serve(*given):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    {ending}

replica._serve = serve
__main__.app(["--coordinator", "127.0.0.1:1", "--engine", "transformers", "--host", "127.0.0.1"])
"""


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        pytest.param("return 3", 3, "", marks=pytest.mark.matrix),  # the end is the same whatever comes before it
        ("raise replica.MillraceError('there is no room.')", 1, "rollout: there is no room."),
        pytest.param("raise KeyError('a defect')", 1, "KeyError", marks=pytest.mark.matrix),
    ],
)
def test_a_stuck_thread_does_not_hold_up_its_end(ending: str, status: int, said: str) -> None:
    script = WITH_A_STUCK_THREAD.format(ending=ending)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout + ended.stderr


def has_samples(page: str) -> bool:
    """Whether the engine runs or waits for samples: it does neither between two answers."""
    return value(page, "millrace_engine_running_samples") + value(page, "millrace_engine_waiting_samples") > 0


def check_metrics(member: fleet_pb2.RegisterRequest) -> None:
    """Of a replica that generates for a job."""
    page = page_with(member.metrics_port, ["\nmillrace_member_version 1.0\n"], has_samples)
    labels = f'engine_release="{member.engine_release}",job_id="{JOB}",member="{member.member_id}"'
    assert f'\nmillrace_member_info{{engine="transformers",{labels}}} 1.0\n' in page
    assert 0.0 < value(page, "millrace_engine_cache_used_ratio") <= 1.0
    assert value(page, "millrace_engine_capacity_samples") == value(page, "millrace_engine_used_slots") == 16
    assert value(page, "millrace_engine_preemptions_total") == 0 and value(page, "millrace_leases_held") >= 4
    assert value(page, "millrace_member_publication_bytes_total") > 0
    for phase in ("prepare", "wire", "verify", "apply", "pause"):
        assert value(page, f'millrace_member_publication_seconds_count{{phase="{phase}"}}') == 1
    assert value(page, 'millrace_grpc_seconds_count{code="OK",method="Rollout/Configure"}') == 1
    assert without_data(page, Owner.REPLICA) == []


def test_sigterm_finishes_what_it_holds_and_leaves(tied_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "log") as replica:
            await replica.serve(job_spec(tied_model))
            for i in range(30):
                replica.coordinator.issue(i, max_response_tokens=150)
            await until(lambda: len(replica.coordinator.leased) >= 4)
            await asyncio.to_thread(check_metrics, *replica.coordinator.members.values())
            below = replica.below
            assert await replica.stop(signal.SIGTERM) == 0
            coordinator = replica.coordinator
            # A lease that was granted while the replica stopped asking is given back.
            assert len(coordinator.leased) == coordinator.answered + len(coordinator.released)
            assert 0 < coordinator.answered < 30 and len(coordinator.released) <= 1
            assert list(coordinator.left.values()) == ["it was told to stop"]
            assert not any(process.is_running() for process in below)

    asyncio.run(scenario())


@pytest.mark.matrix  # tests/services/rollout/member/test_health.py covers it with a thread that stands still
def test_a_replica_ends_whose_vllm_is_stopped(tied_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "log", "--stall-s", "8", engine="vllm") as replica:
            await replica.serve(job_spec(tied_model, "vllm"))
            replica.coordinator.issue(0, max_response_tokens=20)
            await until(lambda: replica.coordinator.answered == 1)
            below = replica.below
            for process in below:
                if "EngineCore" in " ".join(process.cmdline()) + process.name():
                    process.suspend()
            assert await replica.ended() == 1
            assert "has not finished a batch for 8 s" in "".join(replica.coordinator.left.values())
            assert not any(runs(process) for process in below)

    asyncio.run(scenario())


def test_a_second_signal_gives_leases_back(tied_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "log") as replica:
            rollout = {"samples_per_prompt": 16, "max_response_tokens": 6000}
            await replica.serve(job_spec(tied_model, rollout=rollout, trainer={"token_budget": 8192}))
            for i in range(4):
                replica.coordinator.issue(i, samples=16, max_response_tokens=6000)
            await until(lambda: replica.coordinator.leased)
            replica.process.send_signal(signal.SIGTERM)
            await until(lambda: replica.coordinator.draining)
            assert await replica.stop(signal.SIGTERM) == 0
            held = set(replica.coordinator.leased) - {f"lease-{p[2:]}" for p in replica.coordinator.groups}
            assert held and set(replica.coordinator.released) == held
            assert replica.coordinator.left

    asyncio.run(scenario())
