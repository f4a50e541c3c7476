"""What the loss of Redis looks like to those who ask it."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from millrace.contracts.v1 import work_pb2
from services.coordinator.__main__ import _loop_factory
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.redis_server import RedisServer
from services.coordinator.servicers import WorkServicer
from services.coordinator.state.member import Patience
from services.coordinator.store import Store, StoreDown, connection
from services.coordinator.store.connection import Connection
from services.coordinator.work.queue import Queues
from tests.services.coordinator.redis import a_job, with_store


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, _loop_factory()])
@pytest.mark.parametrize("pause_s", [0.0, 1e-4, 3e-4, 1e-3])
def test_a_redis_that_ends_while_a_connection_is_new_is_down(pause_s: float, loop: type, tmp_path: Path) -> None:
    """It ends after it answered the two commands with which redis-py opens a connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"+OK\r\n" * 2)
        await asyncio.sleep(pause_s)
        writer.close()

    async def scenario() -> None:
        server = RedisServer(tmp_path)
        async with await asyncio.start_unix_server(serve, tmp_path / "redis.sock"):
            connection = Connection(server.url)
            for _ in range(20):
                with pytest.raises(StoreDown, match="does not answer"):
                    await connection.together(("SET", "a", "1"), ("GET", "a"))
                with pytest.raises(StoreDown, match="does not answer"):
                    await connection.do("GET", "a")
                assert not await server._ask("PING")
            await connection.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, _loop_factory()])
def test_a_question_that_is_called_off_ends_whatever_it_was_at(redis_url: str, loop: type) -> None:
    """Connecting, sending, waiting for the answer, done: a job's loop that went on would be nobody's."""

    async def scenario() -> None:
        for turns in range(40):
            connection = Connection(redis_url)
            for _ in range(2):  # a new connection, and one that is there
                question = asyncio.create_task(connection.together(("SET", "a", "1"), ("GET", "a")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if question.cancel():
                    with pytest.raises(asyncio.CancelledError):
                        await question
            await connection.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


@pytest.mark.slow
def test_a_redis_that_says_nothing_is_down(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(serve, tmp_path / "redis.sock"):
            connection = Connection(RedisServer(tmp_path).url)
            with pytest.raises(StoreDown, match="does not answer: nothing for 5 s"):
                await connection.do("PING")
            await connection.close()

    asyncio.run(scenario())


def test_a_redis_that_is_full_is_down_until_there_is_room(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        await store.jobs.create(a_job())
        await store.connection.do("CONFIG", "SET", "maxmemory", "1")
        try:
            writes = (
                lambda: store.jobs.update(a_job().id, failure="x"),
                lambda: store.connection.together(("HSET", "a", "b", "c"), ("GET", "d")),
                lambda: store.jobs.create(a_job(2)),
            )
            for write in writes:
                with pytest.raises(
                    StoreDown, match=r"takes no writes: .*command not allowed when used memory"
                ) as refused:
                    await write()
                assert "remove the cause" in refused.value.fix
            assert await store.connection.do("PING") and not await store.connection.up()
        finally:
            await store.connection.do("CONFIG", "SET", "maxmemory", "0")
        assert await store.connection.up()
        await store.jobs.create(a_job(2))

    with_store(redis_url, scenario)


@pytest.mark.parametrize(
    ("answer", "down"),
    [
        ("MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk.", True),
        ("BUSY Redis is busy running a script.", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("CLUSTERDOWN The cluster is down", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("READONLY You can't write against a read only replica.", True),
        ("ERR Error running script (call to f_1): @user_script:9: @user_script: 9: -MISCONF Errors writing", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("ERR prompt BUSY of step 1 is not generated", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_what_redis_refuses_for_its_own_state_is_no_bug_of_ours(answer: str, down: bool, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(1 << 16):
            settings = asked.count(b"CLIENT")
            writer.write(b"+OK\r\n" * settings or f"-{answer}\r\n".encode())
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(serve, tmp_path / "redis.sock"):
            connection = Connection(RedisServer(tmp_path).url)
            with pytest.raises(StoreDown if down else ResponseError):
                await connection.do("HSET", "a", "b", "c")
            await connection.close()

    asyncio.run(scenario())


def test_a_redis_that_evicts_is_known(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        async def says(maxmemory: str, policy: str) -> bool:
            await store.connection.do("CONFIG", "SET", "maxmemory", maxmemory)
            await store.connection.do("CONFIG", "SET", "maxmemory-policy", policy)
            return await store.connection.evicts()

        assert not await says("0", "allkeys-lru")
        assert await says("1gb", "allkeys-lru")
        assert not await says("1gb", "noeviction")
        assert not await says("0", "noeviction")

    with_store(redis_url, scenario)


def test_groups_of_any_size_are_read_in_their_own_time_a_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, most = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal reading, most
        while asked := await reader.read(1 << 16):
            if settings := asked.count(b"CLIENT"):
                writer.write(b"+OK\r\n" * settings)
                continue
            assert asked.count(b"0-") == 1
            reading += 1
            most = max(most, reading)
            await asyncio.sleep(0.4)
            reading -= 1
            writer.write(b"$5\r\n\x0a\x030-1\r\n")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(serve, tmp_path / "redis.sock"):
            store = Store(RedisServer(tmp_path).url)
            fleet, prometheus = Fleet(store, Patience()), PrometheusMetrics()
            work = WorkServicer(fleet, Queues(fleet), store, prometheus)
            request: Any = work_pb2.FetchRequest(job_id="job-1", prompt_ids=["0-1", "0-2"])

            async def fetch() -> int:
                return len([group async for group in work.Fetch(request, cast(Any, None))])

            assert await asyncio.gather(*(fetch() for _ in range(4))) == [2] * 4
            with pytest.raises(StoreDown, match=r"nothing for 0.2 s"):
                await store.connection.do("GET", "0-1")
            await store.close()

    monkeypatch.setattr(connection, "TIMEOUT_S", 0.2)
    asyncio.run(scenario())
    assert most == connection.LARGE_AT_ONCE
