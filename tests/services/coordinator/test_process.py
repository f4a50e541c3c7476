"""The coordinator as a process: how it starts, refuses to start, and stops."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.client import Client
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidState, NotFound, Untrusted
from millrace.rest import JobState
from millrace.wire.channel import Peer
from services.coordinator.redis_server import RedisServer
from tests.certificates import Authority
from tests.forked import Forked
from tests.ports import held_port
from tests.processes import runs
from tests.services.coordinator.cluster import around, until
from tests.services.coordinator.conftest import CoordinatorProcess, running

pytestmark = pytest.mark.slow

NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "sglang"):
            raise ImportError(f"{name} is not for the coordinator")

sys.meta_path.insert(0, Refuse())
import services.coordinator.__main__
import services.coordinator.jobs.loop
from millrace.rl.registry.catalogue import AlgorithmKind, find
find(AlgorithmKind.ADVANTAGE, "grpo")
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def refused(folder: Path, *options: str, within_s: float = 40.0) -> str:
    """What a coordinator says that does not start."""
    with tempfile.TemporaryDirectory() as beside:
        log = Path(beside) / "log"
        process = Forked("services.coordinator", ["--state-dir", str(folder), *options], os.environ, log)
        try:
            status = process.wait(within_s)
        finally:
            process.kill()
        told = log.read_text()
    assert status == 1 and "Traceback" not in told, told
    return told


def test_it_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_taken_port_is_named(option: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = {"--http-port": 0, "--grpc-port": 0} | {option: port}
        told = refused(tmp_path, *(str(part) for pair in others.items() for part in pair))
    assert f"cannot listen on 127.0.0.1:{port}" in told and "Fix: choose another port" in told
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_a_redis_that_is_down_at_the_start_is_named(tmp_path: Path) -> None:
    with held_port() as port:
        url = f"redis://:hidden@127.0.0.1:{port}/0"
        told = refused(tmp_path, "--redis-url", url, "--http-port", "0", "--grpc-port", "0")
    assert "Redis at redis://127.0.0.1" in told and "Fix: start it" in told and "hidden" not in told


def test_two_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with running(tmp_path / "state"):
        told = refused(tmp_path / "state", "--http-port", "0", "--grpc-port", "0")
    assert "another coordinator uses the state folder" in told


def test_an_address_for_all_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE", "MILLRACE_INSECURE", "MILLRACE_PLAINTEXT"):
        monkeypatch.delenv(name, raising=False)
    for option in ("--http-host", "--grpc-host"):
        told = refused(tmp_path, option, "0.0.0.0", "--http-port", "0", "--grpc-port", "0")
        assert "no token is set" in told and "0.0.0.0" in told and "Fix: set MILLRACE_TOKEN" in told
    with running(tmp_path / "open", "--http-host", "0.0.0.0", "--insecure") as process:
        assert process.log().count("no token is set") == 1
    monkeypatch.setenv("MILLRACE_TOKEN", "secret")
    told = refused(tmp_path, "--http-host", "0.0.0.0", "--http-port", "0", "--grpc-port", "0")
    assert "TLS is not set up" in told and "MILLRACE_PLAINTEXT=1" in told
    with running(tmp_path / "state", "--http-host", "0.0.0.0", environment={"MILLRACE_PLAINTEXT": "1"}) as process:
        assert "no token is set" not in process.log() and "TLS is not set up" not in process.log()


def redis_of(process: CoordinatorProcess) -> psutil.Process:
    assert process.process is not None
    (found,) = [p for p in psutil.Process(process.process.pid).children() if "redis" in p.name()]
    return found


def test_sigterm_stops_it_and_its_redis(tmp_path: Path) -> None:
    with running(tmp_path / "state", by_command=True) as process:
        redis = redis_of(process)
        assert process.stop() == 0
        assert not runs(redis)


def test_sigterm_answers_those_who_wait_for_leases(tmp_path: Path) -> None:
    async def played() -> None:
        with running(tmp_path / "state") as process:
            async with around(process) as cluster:
                await cluster.replica()
                await asyncio.sleep(0.5)
                assert await asyncio.to_thread(process.stop) == 0

    asyncio.run(played())


def test_the_redis_of_a_killed_coordinator_is_taken_over(tmp_path: Path, spec: dict[str, Any]) -> None:
    with running(tmp_path / "state") as process:
        before, job = redis_of(process), process.client.submit(spec)
        process.kill()
        assert runs(before)
        process.start()
        assert redis_of(process).pid != before.pid
        assert not runs(before)
        assert process.client.job(job.id).state is JobState.QUEUED


def test_another_protocol_version_is_refused(tmp_path: Path) -> None:
    async def played(address: str) -> None:
        peer = Peer(address)
        request = fleet_pb2.RegisterRequest(
            member_id="rollout-1a2b3c4d",
            kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
            address="127.0.0.1:1",
            protocol_version=7,
            release="9.9",
        )
        with pytest.raises(InvalidState, match=r"rollout-1a2b3c4d .* speaks protocol 7, this coordinator 1") as refusal:
            await peer.call(FleetRpc.Register, request)
        assert "same release" in refusal.value.fix
        await peer.close()

    with running(tmp_path / "state") as process:
        asyncio.run(played(process.address))
        assert process.client.fleet().replicas == []


def test_a_redis_of_its_own_is_restarted_by_others(tmp_path: Path, spec: dict[str, Any]) -> None:
    """REDIS_URL: the coordinator waits for it, says so, and goes on when it is back."""

    async def played() -> None:
        server = RedisServer(tmp_path / "redis")
        await server.start()
        with running(tmp_path / "state", environment={"REDIS_URL": server.url}) as process:
            async with around(process) as cluster:
                trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.05)
                job_id = await cluster.submit(spec)
                await cluster.reached(job_id, 2)
                await server.stop()
                await until(lambda: asyncio.to_thread(process.client.ready), lambda ready: not ready)
                await asyncio.sleep(2.0)  # longer than it takes to be asked for again and again
                assert process.process is not None and process.process.poll() is None
                await server.start()
                await until(lambda: asyncio.to_thread(process.client.ready))
                job = await cluster.ended(job_id)
                assert job.state is JobState.SUCCEEDED and set(trainer.every.values()) == {1}
        await server.stop()

    asyncio.run(played())


def test_rest_and_grpc_by_mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Authority(tmp_path / "tls")
    for name, value in fleet.member("member").variables().items():
        monkeypatch.setenv(name, value)

    async def call(address: str) -> None:
        peer = Peer(address)
        try:
            await peer.call(FleetRpc.Heartbeat, fleet_pb2.HeartbeatRequest(member_id="nobody"))
        finally:
            await peer.close()

    with running(tmp_path / "state") as process:
        address = f"127.0.0.1:{process.grpc_port}"
        with Client(f"https://127.0.0.1:{process.http_port}") as client:
            assert client.fleet().replicas == []
        with pytest.raises(NotFound, match="nobody is not a member"):
            asyncio.run(call(address))
        for name in fleet.member("member").variables():
            monkeypatch.setenv(name, "")
        with pytest.raises(Untrusted, match="speaks TLS, and this process speaks plaintext"):
            asyncio.run(call(address))
        with Client(f"http://127.0.0.1:{process.http_port}", patience_s=0.2) as client, pytest.raises(Untrusted):
            client.fleet()
