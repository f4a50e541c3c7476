"""The embedded redis-server by itself."""

import asyncio
import stat
from pathlib import Path

import pytest

from millrace.errors import Unavailable
from services.coordinator import redis_server
from services.coordinator.redis_server import RedisServer
from services.coordinator.store import Store
from services.coordinator.store.connection import StoreDown
from tests.services.coordinator.cluster import until
from tests.small_disk import filled, small_disk


async def kept(server: RedisServer) -> bytes | None:
    store = Store(server.url)
    try:
        return await store.connection.do("GET", "kept")
    finally:
        await store.close()


def test_what_it_holds_outlives_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = RedisServer(tmp_path)
        await server.start()
        store = Store(server.url)
        assert await store.connection.is_persistent()
        await store.connection.do("SET", "kept", "1")
        await store.close()
        await server.stop()
        again = RedisServer(tmp_path)
        await again.start()
        assert await kept(again) == b"1"
        await again.stop()

    asyncio.run(scenario())


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / ("a" * 60) / ("b" * 60)
        server = RedisServer(folder)
        await server.start()
        assert str(folder) not in server.url
        assert await kept(server) is None
        await server.stop()
        assert (folder / "redis.log").is_file()

    asyncio.run(scenario())


def test_it_is_started_again_when_it_ends_and_given_up_when_it_always_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(redis_server, "RESTARTS", 2)
        server = RedisServer(tmp_path)
        await server.start()
        watching = asyncio.create_task(server.watch())
        for _ in range(3):
            process = server._process
            assert process is not None and not watching.done()
            process.kill()
            await until(lambda p=process: asyncio.sleep(0, server._process is not p or watching.done()))
        with pytest.raises(Unavailable, match="redis-server ended 3 times within 60 s"):
            await watching

    asyncio.run(scenario())


def test_none_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no REDIS_URL and no redis-server"):
        asyncio.run(RedisServer(tmp_path).start())


def test_others_can_read_nothing_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / "redis"
        folder.mkdir(mode=0o755)
        server = RedisServer(folder)
        await server.start()
        await server.stop()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert modes.keys() >= {"appendonly.aof", "redis.log"}
        assert {name for name, mode in modes.items() if mode & 0o077} == set()

    asyncio.run(scenario())


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = RedisServer(tmp_path / "redis")
        await server.start()
        store = Store(server.url)
        try:
            await store.connection.check()
            file = filled(tmp_path)
            with pytest.raises(StoreDown, match=r"takes no writes: .*No space left|takes no writes: .*MISCONF"):
                for _ in range(200):
                    await store.connection.do("SET", "large", "x" * 3000)
                    await asyncio.sleep(0.05)
            assert not await store.connection.up()
            file.unlink()
            async with asyncio.timeout(30):
                await store.connection.wait_until_up()
            await store.connection.do("SET", "kept", "1")
        finally:
            await store.close()
            await server.stop()

    with small_disk(tmp_path, 2):
        asyncio.run(scenario())
