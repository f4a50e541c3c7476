"""Starts a rollout replica: `python -m services.rollout --coordinator host:7600 --engine vllm --port 0`."""

import asyncio
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, NoReturn

import structlog
import typer

from millrace.engines import ENGINE_NAMES
from millrace.errors import MillraceError
from millrace.garbage import collect_rarely
from millrace.ids import MemberId, new_member_id
from millrace.local.sockets import remove_sockets, short_sockets
from millrace.spec.pool import ROLLOUT
from millrace.telemetry import logs
from millrace.telemetry.metrics.prometheus.endpoint import MetricsEndpoint, MetricsPortOption
from millrace.telemetry.metrics.prometheus.every_service import grpc_observer
from millrace.telemetry.spans import export
from millrace.version import VersionOption
from millrace.wire.address import (
    CoordinatorOption,
    HostOption,
    InsecureOption,
    advertise,
    bind_address,
    host_address,
    require_token,
)
from millrace.wire.channel import Peer
from millrace.wire.membership import Membership
from millrace.wire.server import Server
from services.rollout.engines import probe
from services.rollout.engines.lifeline import kill_descendants
from services.rollout.member.health import watch
from services.rollout.nodes.leader import Leader
from services.rollout.nodes.place import (
    NODE_LOST_S,
    LeaderOption,
    NodeLostOption,
    NodeRankOption,
    NodesOption,
    Place,
    set_network_environment,
)
from services.rollout.nodes.process import follow, meet
from services.rollout.nodes.service import servicers as nodes_servicers
from services.rollout.pools.process import PoolProcess, check_pool_option
from services.rollout.pools.process import serve as serve_pool
from services.rollout.pools.replica import PoolReplica
from services.rollout.replica import Replica
from services.rollout.server import servicers
from services.rollout.sessions.server import SessionServer
from services.rollout.work.leases import Leases

log = structlog.get_logger(__name__)
app = typer.Typer(pretty_exceptions_enable=False)


class Ending(Enum):
    """Why a replica ends."""

    STOPPED = auto()
    """A signal, or somebody asked it to drain."""
    DIED = auto()
    """The engine has died."""


@dataclass(frozen=True)
class Options:
    coordinator: str
    engine: str
    engine_release: str
    host: str
    """Name or address by which other hosts reach this replica."""
    port: int
    patience_s: float
    drain_s: float
    stall_s: float
    place: Place | None
    """Which node of the replica this process is; None for a replica on one host."""
    node_lost_s: float
    metrics_port: int
    sessions_port: int
    pool: str


@app.command()
def main(
    coordinator: CoordinatorOption,
    engine: Annotated[str, typer.Option(envvar="MILLRACE_ENGINE", help=f"One of {', '.join(ENGINE_NAMES)}.")] = "vllm",
    host: HostOption = "",
    port: Annotated[
        int, typer.Option(envvar="MILLRACE_PORT", help="Port of the replica's gRPC server; 0: a free port.")
    ] = 0,
    patience_s: Annotated[
        float, typer.Option(envvar="MILLRACE_PATIENCE_S", help="Seconds without a coordinator until the replica ends.")
    ] = 900.0,
    drain_s: Annotated[
        float, typer.Option(envvar="MILLRACE_DRAIN_S", help="Seconds to finish its leases when it is stopped.")
    ] = 600.0,
    stall_s: Annotated[
        float,
        typer.Option(envvar="MILLRACE_STALL_S", min=0.1, help="Seconds that the engine may take for one batch."),
    ] = 300.0,
    pool: Annotated[
        str,
        typer.Option(envvar="MILLRACE_POOL", help="Pool that it scores for; `rollout`: it generates."),
    ] = ROLLOUT,
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    leader: LeaderOption = "",
    node_lost_s: NodeLostOption = NODE_LOST_S,
    metrics_port: MetricsPortOption = 0,
    sessions_port: Annotated[
        int,
        typer.Option(
            envvar="MILLRACE_SESSIONS_PORT",
            min=0,
            max=65_535,
            help="Port of its HTTP endpoint, for sessions of agents or replies of a pool; 0: a free port, which "
            "`millrace fleet` tells.",
        ),
    ] = 0,
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Serves one engine to the fleet until it is told to stop. A second signal ends it without waiting for leases."""
    advertise(host)
    member_id = new_member_id(pool)
    try:
        logs.configure("rollout", member_id)
        export.configure("rollout", member_id)
        check_pool_option(pool, engine, nodes)
        require_token(bind_address(host_address()), insecure=insecure)
        found = probe(engine)
        if not found.ok:
            raise MillraceError(f"engine {engine} cannot run here: {found.why}")
        if (place := Place.of(engine, nodes, node_rank, leader)) is not None:
            set_network_environment()
        port = place.own_port(port) if place is not None else port
        times, ports = (patience_s, drain_s, stall_s), (metrics_port, sessions_port)
        short_sockets()
        where = (host_address(), port, *times, place, node_lost_s, *ports, pool)
        options = Options(coordinator, engine, found.release, *where)
    except MillraceError as error:
        print(f"rollout: {error}", file=sys.stderr)
        _end(1)
    asyncio.run(_process(member_id, options))


async def _process(member_id: MemberId, options: Options) -> NoReturn:
    """Serves, and ends the process from inside the event loop: asyncio.run would wait for all of its threads, even for
    one that never returns."""
    collect_rarely()
    status = 1
    try:
        place = options.place
        if place is not None and place.rank > 0:
            engine = (options.engine, options.engine_release)
            status = await follow(place, engine, _signals(), options.patience_s, options.drain_s)
        elif options.pool != ROLLOUT:
            process = PoolProcess(
                *(options.coordinator, options.host, options.port, options.metrics_port, options.sessions_port),
                *(options.patience_s, options.drain_s),
            )
            replica = PoolReplica(member_id, options.pool, options.engine, options.engine_release)
            status = await serve_pool(replica, process, _signals())
        else:
            status = await _serve(member_id, options)
    except MillraceError as error:
        print(f"rollout: {error}", file=sys.stderr)
    except Exception as error:
        log.error("the replica failed", exc_info=error)
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    try:
        kill_descendants()
        remove_sockets()
        export.flush()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Threads and destructors of engine libraries could block or crash a normal exit.
        os._exit(status)


async def _serve(member_id: MemberId, options: Options) -> int:
    """Returns the exit status. Raises MillraceError where the coordinator refuses the replica."""
    software = (options.engine, options.engine_release)
    nodes = None if options.place is None else Leader(member_id, options.place, *software, options.node_lost_s)
    coordinator = Peer(options.coordinator)
    leases = Leases(coordinator, member_id)
    replica = Replica(member_id, *software, leases, nodes)
    served = {**servicers(replica), **(nodes_servicers(nodes) if nodes is not None else {})}
    bind = bind_address(options.host)
    server = Server(served, bind, options.port, observe=grpc_observer(replica.metrics.registry))
    metrics = MetricsEndpoint(replica.metrics.registry, bind, options.metrics_port, replica.metrics.refresh)
    replica.metrics_port = metrics.port
    sessions = SessionServer(replica.sessions, bind, options.sessions_port, options.host)
    replica.sessions_port = sessions.port
    membership = replica.membership(coordinator, f"{options.host}:{server.port}", options.patience_s)
    leases.on_forgotten, leases.on_death = membership.forgotten, replica.died_of
    stops, ending = _signals(), Ending.DIED
    await server.start()
    sessions.start()
    watching = None if nodes is None else asyncio.create_task(nodes.watch())
    try:
        if nodes is None or await meet(nodes, replica, stops, options.patience_s):
            ending = await _member(replica, membership, server, stops, options)
        else:
            ending = Ending.STOPPED
    finally:
        if nodes is not None and watching is not None:
            watching.cancel()
            why = replica.failure or "it was told to stop"
            await nodes.end(why, for_good=ending is Ending.STOPPED and not replica.died.is_set())
    await sessions.stop()
    await server.stop(1.0)
    metrics.close()
    await coordinator.close()
    return 1 if replica.died.is_set() else 0


async def _member(
    replica: Replica, membership: Membership, server: Server, stops: asyncio.Queue[int], options: Options
) -> Ending:
    """The replica's life as a member of the fleet; why it ended. Raises MillraceError as `Membership.run`."""
    beating = asyncio.create_task(membership.run())
    pulling = asyncio.create_task(replica.leases.run())
    watching = asyncio.create_task(watch(replica, options.stall_s, replica.died_of))
    try:
        ending = await _until_ending(replica, stops, beating, pulling)
        if ending is Ending.DIED:
            await replica.name_lost_nodes()
        if ending is Ending.STOPPED:
            await drain(replica, membership, stops, options.drain_s)
    finally:
        pulling.cancel()
        watching.cancel()
        await server.healthy(False)
        await replica.close()
        beating.cancel()
    await membership.leave(replica.failure or "it was told to stop", failed=replica.died.is_set())
    return ending


def _signals() -> asyncio.Queue[int]:
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
    replica: Replica, stops: asyncio.Queue[int], beating: asyncio.Task[None], pulling: asyncio.Task[None]
) -> Ending:
    """Waits for the first reason to end. Raises the error that ended one of the two loops."""
    stopped = asyncio.create_task(stops.get())
    drained = asyncio.create_task(replica.draining.wait())
    died = asyncio.create_task(replica.died.wait())
    await asyncio.wait({stopped, drained, died, beating, pulling}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, drained, died):
        task.cancel()
    for loop in (beating, pulling):
        if loop.done():
            loop.result()
    return Ending.DIED if replica.died.is_set() else Ending.STOPPED


async def drain(replica: Replica, membership: Membership, stops: asyncio.Queue[int], drain_s: float) -> None:
    """Finishes the leases that are held. After a second signal, or after `drain_s`, the caller returns the rest."""
    replica.drain()
    await membership.drain()
    finished = asyncio.create_task(replica.leases.finish())
    again = asyncio.create_task(stops.get())
    died = asyncio.create_task(replica.died.wait())
    await asyncio.wait({finished, again, died}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (finished, again, died):
        task.cancel()


if __name__ == "__main__":
    app()
