"""What the loss of Redis looks like to those who ask it."""

import asyncio
from pathlib import Path

import pytest

from services.coordinator.__main__ import _loop_factory
from services.coordinator.redis_server import RedisServer
from services.coordinator.store import StoreDown
from services.coordinator.store.connection import Connection


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
