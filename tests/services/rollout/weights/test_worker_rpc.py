"""Calls into workers of other hosts: over TCP, for whoever shows the secret, with deadlines of another host's clock."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import Unavailable
from services.rollout.weights import worker_rpc
from services.rollout.weights.worker_messages import Introduction, Reply, Request
from services.rollout.weights.worker_methods import WorkerMethods
from services.rollout.weights.worker_rpc import HEADER, WorkerRpc, WorkerRpcServer
from tests.certificates import Authority


class Worker:
    """A worker that notes how long each call may still take, by its own clock."""

    def __init__(self, place: str, rank: int) -> None:
        self.left_s: list[float] = []
        self.called = threading.Event()
        self.server = WorkerRpcServer(place, Introduction(rank), self._carry_out)

    def _carry_out(self, request: Request) -> Reply:
        self.left_s.append(request.deadline - worker_rpc.time.monotonic())
        self.called.set()
        return Reply(request.number, {"rank": len(self.left_s)})


async def listening(scenario: Callable[[WorkerRpc, str], Any]) -> None:
    rpc = WorkerRpc("vLLM")
    try:
        await scenario(rpc, await rpc.listen("127.0.0.1"))
    finally:
        await rpc.close()


def test_workers_answer_over_the_network() -> None:
    async def scenario(rpc: WorkerRpc, place: str) -> None:
        assert place.startswith("tcp://") and "@127.0.0.1:" in place
        workers = [await asyncio.to_thread(Worker, place, rank) for rank in (1, 0)]
        assert [each.rank for each in await rpc.wait_for_workers(2, 60)] == [0, 1]
        assert await rpc.ask(WorkerMethods.checksums) == [{"rank": 1}, {"rank": 1}]
        for worker in workers:
            worker.server.close()

    asyncio.run(listening(scenario))


def test_a_deadline_means_the_same_by_another_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's host was started a day earlier than the replica's."""

    class Clock:
        @staticmethod
        def monotonic() -> float:
            day_s = 86_400.0 if threading.current_thread() is not threading.main_thread() else 0.0
            return time.monotonic() + day_s

    async def scenario(rpc: WorkerRpc, place: str) -> None:
        worker = await asyncio.to_thread(Worker, place, 0)
        await rpc.wait_for_workers(1, 60)
        await rpc.ask(WorkerMethods.checksums)
        assert worker_rpc.RPC_S - 30 < worker.left_s[0] <= worker_rpc.RPC_S + 1

    monkeypatch.setattr(worker_rpc, "time", Clock)
    asyncio.run(listening(scenario))


def test_a_worker_without_the_secret_is_refused() -> None:
    async def scenario(rpc: WorkerRpc, place: str) -> None:
        address = place.partition("@")[2]
        with pytest.raises(Unavailable, match="has not let this worker in"):
            await asyncio.to_thread(Worker, f"tcp://{'0' * 32}@{address}", 0)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEADER.pack(1 << 31))  # a frame that is too large for an introduction is not waited for
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        with pytest.raises(Unavailable, match="0 of 1 workers of vLLM connected"):
            await rpc.wait_for_workers(1, 0.1)

    asyncio.run(listening(scenario))


def test_a_replica_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(Unavailable, match="cannot reach its replica"):
        Worker("tcp://secret@127.0.0.1:1", 0)


def test_workers_come_by_tls_where_the_replica_has_an_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fleet = Authority(tmp_path / "fleet")
    stranger = dataclasses.replace(Authority(tmp_path / "other", "other").member("stranger"), ca=fleet.ca)

    def become(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    async def scenario(rpc: WorkerRpc, place: str) -> None:
        worker = await asyncio.to_thread(Worker, place, 0)
        await rpc.wait_for_workers(1, 60)
        assert await rpc.ask(WorkerMethods.checksums) == [{"rank": 1}]
        worker.server.close()
        become(stranger.variables())
        with pytest.raises(Unavailable, match="has not let this worker in"):
            await asyncio.to_thread(Worker, place, 1)
        become(dict.fromkeys(stranger.variables(), ""))
        with pytest.raises(Unavailable, match="has not let this worker in"):
            await asyncio.to_thread(Worker, place, 1)

    become(fleet.member("replica").variables())
    asyncio.run(listening(scenario))
