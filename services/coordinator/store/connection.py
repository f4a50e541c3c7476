"""The connection to Redis: commands, scripts, and the errors of a Redis that cannot be used."""

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.errors import MillraceError, Unavailable
from services.coordinator.state.deaths import lua_budgets
from services.coordinator.state.job import lua_ended
from services.coordinator.state.ledger import lua_table

log = structlog.get_logger(__name__)
SCRIPTS = Path(__file__).parent / "scripts"
SHARED = ("ledger", "index")
"""Files of functions that every script can use."""
TIMEOUT_S = 5.0
LARGE_S = 30.0
LARGE_AT_ONCE = 2
"""At most this many answers that may be large are read at a time, each within LARGE_S."""
CONNECTIONS = 32
LOST = (RedisConnectionError, RedisTimeoutError, OSError)
REFUSES = (OutOfMemoryError, ReadOnlyError, ClusterDownError)
REFUSAL_CODES = re.compile("(?:^|: -?)(?:OOM|MISCONF|BUSY|NOREPLICAS|READONLY|CLUSTERDOWN|MASTERDOWN) ")
"""Error codes of the Redis protocol that mean the same, where redis-py has no class for them. The code is the first
word of the error, or follows a colon where a command inside a script failed."""
PROBE = "millrace:probe"


class StoreDown(Unavailable):
    """Redis does not answer, or takes no writes: its memory or disk is full, its replicas are gone. Nothing is lost:
    the caller waits for Redis and starts again from what it holds."""


class Superseded(MillraceError):
    """Another coordinator was started on this Redis. The newest one works, all others stop."""


@dataclass(frozen=True)
class Usage:
    """What a Redis uses."""

    memory_bytes: int
    clients: int
    """Connections."""


class Connection:
    """One Redis. The scripts are the transitions of ledgers and jobs: each is atomic, and each may be repeated."""

    def __init__(self, url: str) -> None:
        self.name = _without_password(url)
        self.up_since = -math.inf
        """When Redis answered again after it had been down, in time.monotonic()."""
        self.observe: Callable[[float], None] = lambda _: None
        """Called with the seconds that each command or script took."""
        self._down = False
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=TIMEOUT_S,
            # `_answer` limits the time. redis-py would send inside asyncio.wait_for, which before Python 3.12 swallows
            # a cancellation that comes just as the sending ends: a cancelled job loop would continue.
            socket_timeout=None,
            socket_connect_timeout=2.0,
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            protocol=2,
        )
        self._redis = Redis.from_pool(pool)
        prelude = (
            lua_table()
            + lua_ended()
            + lua_budgets()
            + "".join((SCRIPTS / f"{name}.lua").read_text() for name in SHARED)
        )
        sources = {p.stem: prelude + p.read_text() for p in SCRIPTS.glob("*.lua") if p.stem not in SHARED}
        self._scripts = {name: (hashlib.sha1(source.encode()).hexdigest(), source) for name, source in sources.items()}

    async def do(self, *command: Any) -> Any:
        """One command. Raises StoreDown."""
        return await self._answer(lambda: self._redis.execute_command(*command))

    async def read(self, *command: Any) -> Any:
        """One command whose answer may be large. Raises StoreDown."""
        async with self._large:
            return await self._answer(lambda: self._redis.execute_command(*command), LARGE_S)

    async def together(self, *commands: Sequence[Any]) -> list[Any]:
        """Several commands in one transaction and one round trip. Raises StoreDown."""
        pipeline = self._redis.pipeline(transaction=True)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await self._answer(pipeline.execute)
        return answers

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
        """One script of scripts/, by name. Raises StoreDown."""
        digest, source = self._scripts[script]
        try:
            return await self.do("EVALSHA", digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self.do("EVAL", source, len(keys), *keys, *arguments)

    async def _answer(self, ask: Callable[[], Awaitable[Any]], within_s: float | None = None) -> Any:
        began = time.perf_counter()
        try:
            answer = await self._asked(ask, within_s or TIMEOUT_S)
        except StoreDown:
            self._down = True
            raise
        self.observe(time.perf_counter() - began)
        if self._down:
            self._down, self.up_since = False, time.monotonic()
        return answer

    async def _asked(self, ask: Callable[[], Awaitable[Any]], within_s: float) -> Any:
        try:
            async with asyncio.timeout(within_s):
                return await ask()
        except (*LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_closed_transport(error):
                raise
            why, fix = (
                str(error) or f"nothing for {within_s:g} s",
                "start it again; everything continues from what it holds.",
            )
            raise StoreDown(f"Redis at {self.name} does not answer: {why}.", fix) from error
        except ResponseError as error:
            if not isinstance(error, REFUSES) and not REFUSAL_CODES.search(str(error)):
                raise
            fix = "remove the cause; everything continues from what it holds."
            raise StoreDown(f"Redis at {self.name} takes no writes: {error}", fix) from error

    async def up(self) -> bool:
        """Whether Redis answers, has loaded its data and takes writes. A Redis that is full still answers a PING."""
        try:
            await self.check()
        except (StoreDown, RedisError):
            return False
        return True

    async def check(self) -> None:
        """Raises StoreDown, or an error of Redis, if Redis is not up."""
        await self.do("SET", PROBE, "1")

    async def wait_until_up(self) -> None:
        """Waits until Redis is up; asks at intervals that grow to at most 2 s."""
        pause_s = 0.1
        while not await self.up():
            await asyncio.sleep(pause_s)
            pause_s = min(2.0, pause_s * 2)

    async def usage(self) -> Usage | None:
        """What Redis uses; None where it does not say: hosted ones forbid the question. Raises StoreDown."""
        try:
            memory, clients = [await self.do("INFO", section) for section in ("memory", "clients")]
        except ResponseError:
            return None
        return Usage(int(memory["used_memory"]), int(clients["connected_clients"]))

    async def is_persistent(self) -> bool:
        """Whether Redis writes its data to disk. True where it does not say: hosted ones forbid the question."""
        try:
            answer = await self.do("CONFIG", "GET", "appendonly")
        except ResponseError:
            return True
        return b"no" not in answer

    async def evicts(self) -> bool:
        """Whether Redis deletes data when its memory is full. False where it does not say."""
        try:
            answer = await self.do("CONFIG", "GET", "maxmemory*")
        except ResponseError:
            return False
        settings = dict(zip(answer[::2], answer[1::2], strict=True))
        limit, policy = settings.get(b"maxmemory", b"0"), settings.get(b"maxmemory-policy", b"noeviction")
        return bool(limit != b"0" and policy != b"noeviction")

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


def is_closed_transport(error: RuntimeError) -> bool:
    """Whether `error` is the one that uvloop raises for a write to a connection that the other end has closed. uvloop
    has no class for it; asyncio's own loop raises ConnectionResetError."""
    return "handler is closed" in str(error)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def text(value: bytes | None) -> str:
    """A value of Redis as text; empty where there is none."""
    return "" if value is None else value.decode()
