"""The connection to Redis: commands, scripts, and the errors of a Redis that cannot be used."""

import asyncio
import contextlib
import hashlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.errors import Unavailable
from services.coordinator.state.faults import lua_budgets
from services.coordinator.state.job import lua_ended
from services.coordinator.state.ledger import lua_table
from services.coordinator.store.address import NO_CLUSTER, pool, refused, shown

log = structlog.get_logger(__name__)
SCRIPTS = Path(__file__).parent / "scripts"
SHARED = ("ledger", "index")
"""Files of functions that every script can use."""
TIMEOUT_S = 5.0
LARGE_S = 30.0
LARGE_AT_ONCE = 2
"""Answers that may be large and are read at the same time, each within LARGE_S."""
CONNECTIONS = 32
LOST = (RedisConnectionError, RedisTimeoutError, OSError)
REFUSES = (OutOfMemoryError, ReadOnlyError, ClusterDownError)
REFUSAL_CODES = re.compile("(?:^|: -?)(?:OOM|MISCONF|BUSY|NOREPLICAS|READONLY|CLUSTERDOWN|MASTERDOWN) ")
"""Error codes of the Redis protocol that mean the same, if redis-py has no class for them. The code is the first
word of the error, or follows a colon if a command inside a script failed."""
PROBE = "millrace:probe"
EPOCH = "millrace:coordinators"
"""Epoch of the coordinator that led last. Every write of a leader names its own: see leadership.py."""
OLD_EPOCH = "SUPERSEDED"
"""First word of the error that a write with an old epoch gets."""
FENCE = f"""
local fence, epoch = table.remove(KEYS), table.remove(ARGV)
if epoch ~= '0' and redis.call('GET', fence) ~= epoch then return redis.error_reply('{OLD_EPOCH} epoch ' .. epoch) end
"""
"""The beginning of every script. Its last key is EPOCH, its last argument the caller's epoch; 0: it does not lead."""
READS = frozenset(
    (
        *("PING", "TIME", "INFO", "CONFIG", "EXISTS", "SCAN", "DUMP", "PTTL", "GET", "STRLEN", "EVAL", "EVALSHA"),
        *("HGET", "HMGET", "HGETALL", "HKEYS", "HLEN", "SMEMBERS", "LRANGE", "LLEN", "XRANGE", "XREVRANGE", "XLEN"),
        *("ZRANGE", "ZCARD", "ZCOUNT", "ZSCORE", "ZRANGEBYSCORE"),
    )
)
"""Commands that change nothing. All others of a leader are fenced."""
MOST_PARTS = 7000
"""Parts of one command that a script takes: Lua unpacks no more than 8000 values."""


class StoreDown(Unavailable):
    """Redis does not answer, or takes no writes: its memory or disk is full, its replicas are gone. Nothing is lost:
    the caller waits for Redis and starts again from what it holds."""


class Superseded(Unavailable):
    """Another coordinator leads. Nothing that this one still does changes the state."""


@dataclass(frozen=True)
class Usage:
    """What a Redis uses."""

    memory_bytes: int
    clients: int
    """Connections."""


class Connection:
    """One Redis. The scripts are the transitions of ledgers and jobs: each is atomic, and each may be repeated."""

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self.up_since = -math.inf
        """When Redis answered again after it had been down, in time.monotonic()."""
        self.observe: Callable[[float], None] = lambda _: None
        """Called with the seconds that each command or script took."""
        self._url = url
        self.epoch = 0
        """Epoch of this coordinator's lease; 0: it does not lead, and its writes are not fenced."""
        self._down = False
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        options = {
            "max_connections": CONNECTIONS,
            "timeout": TIMEOUT_S,
            # `_answer` limits the time. redis-py would send inside asyncio.wait_for, which before Python 3.12 swallows
            # a cancellation that comes just as the sending ends: a cancelled job loop would continue.
            "socket_timeout": None,
            "socket_connect_timeout": 2.0,
            "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            "protocol": 2,
        }
        self._pool = pool(url, options)
        self._master: tuple[str, int] | None = None
        """The Redis on which this coordinator began to lead, if Sentinel names it."""
        self._redis = Redis.from_pool(self._pool)
        prelude = (
            FENCE
            + lua_table()
            + lua_ended()
            + lua_budgets()
            + "".join((SCRIPTS / f"{name}.lua").read_text() for name in SHARED)
        )
        sources = {p.stem: prelude + p.read_text() for p in SCRIPTS.glob("*.lua") if p.stem not in SHARED}
        self._scripts = {name: (hashlib.sha1(source.encode()).hexdigest(), source) for name, source in sources.items()}

    async def do(self, *command: Any) -> Any:
        """One command. Raises StoreDown, and Superseded for a write if another coordinator leads."""
        if self.epoch and command[0] not in READS:
            return (await self.together(command))[0]
        return await self._answer(lambda: self._redis.execute_command(*command))

    async def read(self, *command: Any) -> Any:
        """One command whose answer may be large. Raises StoreDown."""
        async with self._large:
            return await self._answer(lambda: self._redis.execute_command(*command), LARGE_S)

    async def together(self, *commands: Sequence[Any], within_s: float | None = None) -> list[Any]:
        """Several commands in one transaction and one round trip. Raises StoreDown, and Superseded for a write if
        another coordinator leads. `within_s`: for commands of a caller that does not lead, instead of TIMEOUT_S."""
        if self.epoch and any(command[0] not in READS for command in commands):
            return await self._fenced(commands)
        return await self._transaction(commands, within_s)

    async def _transaction(self, commands: Sequence[Sequence[Any]], within_s: float | None = None) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=True)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await self._answer(pipeline.execute, within_s)
        return answers

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any] = (), *, large: bool = False) -> Any:
        """One script of scripts/, by name. Its answer may be `large`. Raises StoreDown, and Superseded if another
        coordinator leads."""
        digest, source = self._scripts[script]
        parts = (len(keys) + 1, *keys, EPOCH, *arguments, self.epoch)
        ask = self.read if large else self.do
        try:
            return await ask("EVALSHA", digest, *parts)
        except NoScriptError:
            return await ask("EVAL", source, *parts)

    async def _fenced(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Commands of a leader, as a script. One with too many parts for it comes after the fence, not within it."""
        if any(len(command) > MOST_PARTS for command in commands):
            await self.run("fenced", [])
            return await self._transaction(commands)
        found: list[Any] = await self.run("fenced", [], [part for each in commands for part in (len(each), *each)])
        return found

    def superseded(self) -> Superseded:
        """The error if this coordinator does not lead any more."""
        what = f"another coordinator leads on Redis at {self.name}."
        return Superseded(what, "nothing: ask that one; this one stands by.")

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
                answer = await ask()
        except (*LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_closed_transport(error):
                raise
            why, fix = (
                str(error) or f"nothing for {within_s:g} s",
                "start it again; everything continues from what it holds.",
            )
            raise StoreDown(f"Redis at {self.name} does not answer: {why}.", fix) from error
        except ResponseError as error:
            if OLD_EPOCH in str(error):
                raise self.superseded() from error
            if not isinstance(error, REFUSES) and not REFUSAL_CODES.search(str(error)):
                raise
            fix = "remove the cause; everything continues from what it holds."
            raise StoreDown(f"Redis at {self.name} takes no writes: {error}", fix) from error
        if self.epoch and self._now_at() != self._master:
            raise self._failed_over()
        return answer

    def lead(self, epoch: int) -> None:
        """Makes later writes those of the leader of this epoch, as long as the same Redis answers."""
        self.epoch, self._master = epoch, self._now_at()

    def _now_at(self) -> tuple[str, int] | None:
        """The Redis that Sentinel named last; None without Sentinel."""
        address: tuple[str, int] | None = getattr(self._pool, "master_address", None)
        return address

    def _failed_over(self) -> Superseded:
        """The error after a failover. The new Redis may lack the last writes of the old one, and what this process
        remembers of the jobs is not to be written over it."""
        what = f"Redis at {self.name} failed over from {self._master} to {self._now_at()}."
        return Superseded(what, "nothing: the coordinator that leads next begins again from what that Redis holds.")

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

    async def wait_for(self, within_s: float | None) -> None:
        """Waits until Redis is up, at most so long. Raises Unavailable, and InvalidState for a server of a cluster."""
        try:
            async with asyncio.timeout(within_s):
                await self.wait_until_up()
        except TimeoutError as error:
            with contextlib.suppress(StoreDown):
                await self.check_no_cluster()  # such a server refuses writes
            what = f"Redis at {self.name} took no write within {within_s:g} s."
            raise Unavailable(what, "start it, or set REDIS_URL to a Redis that runs and takes writes.") from error
        await self.check_no_cluster()

    async def wait_until_up(self) -> None:
        """Waits until Redis is up; asks at intervals that grow to at most 2 s."""
        pause_s = 0.1
        while not await self.up():
            await asyncio.sleep(pause_s)
            pause_s = min(2.0, pause_s * 2)

    @contextlib.asynccontextmanager
    async def outlasted(self) -> AsyncIterator[None]:
        """What is done inside is given up if Redis is down; this waits until it is up again."""
        try:
            yield
        except StoreDown:
            await self.wait_until_up()

    async def usage(self) -> Usage | None:
        """What Redis uses; None if it does not say: hosted ones forbid the question. Raises StoreDown."""
        try:
            memory, clients = [await self.do("INFO", section) for section in ("memory", "clients")]
        except ResponseError:
            return None
        return Usage(int(memory["used_memory"]), int(clients["connected_clients"]))

    async def check_no_cluster(self) -> None:
        """Raises InvalidState if the server is one of a Redis Cluster."""
        try:
            cluster = await self.do("INFO", "cluster")
        except ResponseError:
            return
        if int(cluster.get("cluster_enabled", 0)):
            raise refused(self._url, *NO_CLUSTER)

    async def is_persistent(self) -> bool:
        """Whether Redis writes its data to disk. True if it does not say: hosted ones forbid the question."""
        try:
            answer = await self.do("CONFIG", "GET", "appendonly")
        except ResponseError:
            return True
        return b"no" not in answer

    async def evicts(self) -> bool:
        """Whether Redis deletes data when its memory is full. False if it does not say."""
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


def text(value: bytes | None) -> str:
    """A value of Redis as text; empty if there is none."""
    return "" if value is None else value.decode()
