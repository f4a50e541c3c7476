"""A replica as a process: its servers, its life as a member of the fleet, whether its engine computes, how it ends."""

import asyncio
import contextlib
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import grpc
import structlog

from millrace.errors import Unavailable
from millrace.telemetry.metrics.prometheus.endpoint import MetricsEndpoint
from millrace.telemetry.metrics.prometheus.every_service import grpc_observer
from millrace.wire.address import bind_address
from millrace.wire.channel import Peer
from millrace.wire.http_server import HttpServer, listening
from millrace.wire.membership import Membership
from millrace.wire.server import Server
from millrace.wire.tls import server_context
from services.rollout.engine import Engine, EngineDied
from services.rollout.member.member import FleetMember, MemberMetrics

KEEP_ALIVE_S = 30
"""How long a connection without a request is kept. Clients connect again for a turn after a longer pause."""
BACKLOG = 4096
"""Connections that wait to be accepted."""


class HttpEndpoint:
    """Serves an ASGI application at `host:port`; port 0 takes a free one. Raises Unavailable if the port is
    taken."""

    def __init__(self, app: object, host: str, port: int) -> None:
        self._held = contextlib.ExitStack()
        self._socket = self._held.enter_context(listening(host, port, "--sessions-port", BACKLOG))
        self.port = int(self._socket.getsockname()[1])
        self._server = HttpServer(app, KEEP_ALIVE_S, BACKLOG)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answers requests from now on."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket too, until the server that is returned is closed."""
        return await self._server.serve_also(listener)

    async def stop(self) -> None:
        """Ends the requests in progress within a few seconds."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        self._held.close()


class Ending(Enum):
    """Why a replica ends."""

    STOPPED = auto()
    """A signal, or somebody asked it to drain."""
    DIED = auto()
    """The engine has died."""


@dataclass(frozen=True)
class Reached:
    """How a replica is reached, and how long it is patient."""

    coordinator: str
    host: str
    """Name or address by which other hosts reach this replica."""
    port: int
    metrics_port: int
    sessions_port: int
    patience_s: float
    drain_s: float

    @property
    def bind(self) -> str:
        """The address at which its servers listen."""
        return bind_address(self.host)


class MemberProcess:
    """The servers of a replica, and its life in the fleet. Raises Unavailable if a port is taken."""

    def __init__(
        self,
        member: FleetMember,
        reached: Reached,
        coordinator: Peer,
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
        metrics: MemberMetrics,
        http: HttpEndpoint,
    ) -> None:
        self._member, self._reached, self._coordinator, self._http = member, reached, coordinator, http
        observe = grpc_observer(metrics.registry)
        self._server = Server(services, reached.bind, reached.port, observe=observe)
        where = (reached.bind, reached.metrics_port)
        self._metrics = MetricsEndpoint(metrics.registry, *where, metrics.refresh, server_context())
        member.metrics_port, member.sessions_port = self._metrics.port, http.port
        address = f"{reached.host}:{self._server.port}"
        self.membership = member.membership(coordinator, address, reached.patience_s)

    async def start(self) -> None:
        """Answers calls and requests from now on."""
        await self._server.start()
        self._http.start()

    async def live(
        self,
        stops: "asyncio.Queue[int]",
        needed: Sequence[Coroutine[Any, Any, None]] = (),
        beside: Sequence[Coroutine[Any, Any, None]] = (),
    ) -> Ending:
        """The replica's life as a member of the fleet; why it ended. `needed`: loops whose error ends it too; `beside`:
        those that may end before it. Raises MillraceError as `Membership.run`."""
        member = self._member
        beating, *working = [asyncio.create_task(each) for each in (self.membership.run(), *needed)]
        others = [asyncio.create_task(each) for each in beside]
        try:
            ending = await _until_ending(member, stops, [beating, *working])
            if ending is Ending.DIED:
                await member.explain_death()
            else:
                await drain(member, self.membership, stops, self._reached.drain_s)
        finally:
            for task in (*working, *others):
                task.cancel()
            await self._server.healthy(False)
            await member.close()
            beating.cancel()
        await self.membership.leave(member.failure or "it was told to stop", failed=member.died.is_set())
        return ending

    async def stop(self) -> int:
        """Ends the servers; returns the exit status of the process."""
        await self._http.stop()
        await self._server.stop(1.0)
        self._metrics.close()
        await self._coordinator.close()
        return 1 if self._member.died.is_set() else 0


def signals() -> "asyncio.Queue[int]":
    """A queue that receives SIGTERM and SIGINT. The end of the process that forked this one counts as SIGTERM."""
    stops: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stops.put_nowait, number)
    if (launcher := multiprocessing.parent_process()) is not None:
        gone = launcher.sentinel

        def on_end() -> None:
            loop.remove_reader(gone)
            stops.put_nowait(signal.SIGTERM)

        loop.add_reader(gone, on_end)
    return stops


async def _until_ending(
    member: FleetMember, stops: "asyncio.Queue[int]", loops: Sequence["asyncio.Task[None]"]
) -> Ending:
    """Waits for the first reason to end. Raises the error that ended one of the loops."""
    await _first(stops, member, loops)
    for loop in loops:
        if loop.done():
            loop.result()
    return Ending.DIED if member.died.is_set() else Ending.STOPPED


async def drain(member: FleetMember, membership: Membership, stops: "asyncio.Queue[int]", drain_s: float) -> None:
    """Finishes the work in progress. After a second signal, or after `drain_s`, the caller ends the rest."""
    member.drain()
    await membership.drain()
    finished = asyncio.create_task(member.finish())
    await _first(stops, member, [finished], drained=False, within_s=drain_s)
    finished.cancel()


async def _first(
    stops: "asyncio.Queue[int]",
    member: FleetMember,
    tasks: Sequence["asyncio.Task[None]"],
    *,
    drained: bool = True,
    within_s: float | None = None,
) -> None:
    """Returns at the next signal, when the engine dies, when one of the tasks ends, with `drained` also when the member
    drains, and after `within_s`."""
    events = [member.died, *([member.draining] if drained else [])]
    waiting = [asyncio.create_task(event.wait()) for event in events]
    stopped = asyncio.create_task(stops.get())
    await asyncio.wait({*tasks, *waiting, stopped}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (*waiting, stopped):
        task.cancel()


log = structlog.get_logger(__name__)
LOOKS = 4
"""How often the engine is asked within the time that it may stand still."""


class Watched(Protocol):
    """A replica."""

    @property
    def ready_engine(self) -> Engine | None:
        """The engine, while it is neither starting nor stopping; None otherwise."""


async def watch(replica: Watched, limit_s: float, on_death: Callable[[EngineDied], None]) -> None:
    """Asks the engine whether it still computes, until cancelled. Calls `on_death` if it has not answered for
    `limit_s`, and returns."""
    since, engine = time.monotonic(), None
    while True:
        await asyncio.sleep(limit_s / LOOKS)
        if (now := replica.ready_engine) is None or now is not engine:
            since, engine = time.monotonic(), now
            continue
        left_s = since + limit_s - time.monotonic()
        if await _answers(engine, max(left_s, 0.0)):
            since = time.monotonic()
        elif replica.ready_engine is engine and time.monotonic() - since >= limit_s:
            on_death(EngineDied(f"the engine has not finished a batch for {limit_s:g} s.", "see its log above."))
            return


async def _answers(engine: Engine, within_s: float) -> bool:
    """Whether the engine answers in that time. A call that fails is an answer: what has ended is found elsewhere."""
    asking = asyncio.ensure_future(engine.finish_batch())
    await asyncio.wait({asking}, timeout=within_s)
    if not asking.done():
        asking.cancel()
        return False
    if isinstance(error := asking.exception(), Unavailable):
        log.warning("the engine does not answer", error=str(error))
        return False
    return True
