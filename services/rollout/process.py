"""A replica as a process: from its options to its end."""

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import NoReturn

import structlog

from millrace.errors import MillraceError
from millrace.ids import MemberId, new_member_id
from millrace.local.folders import remove_sockets, short_sockets
from millrace.service_process import collect_rarely
from millrace.spec.pool import ROLLOUT
from millrace.telemetry import logs
from millrace.telemetry.spans import export
from millrace.wire.address import bind_address, host_address, require_protection
from millrace.wire.channel import Peer
from services.rollout.engines import probe
from services.rollout.engines.lifeline import kill_descendants
from services.rollout.member.process import Ending, MemberProcess, Reached, signals, watch
from services.rollout.nodes.follower import follow
from services.rollout.nodes.leader import Leader, meet
from services.rollout.nodes.leader import servicers as nodes_servicers
from services.rollout.nodes.place import Place, set_network_environment
from services.rollout.pools.replica import PoolReplica
from services.rollout.pools.service import check_pool_option
from services.rollout.pools.service import serve as serve_pool
from services.rollout.replica import Replica
from services.rollout.server import servicers
from services.rollout.sessions.server import SessionServer
from services.rollout.work.leases import Leases

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Given:
    """What the command line says: see the options of `python -m services.rollout`."""

    coordinator: str
    engine: str
    port: int
    patience_s: float
    drain_s: float
    stall_s: float
    pool: str
    nodes: int
    node_rank: int
    leader: str
    node_lost_s: float
    admit_by_cache: bool
    metrics_port: int
    sessions_port: int
    insecure: bool


def start(given: Given) -> NoReturn:
    """Serves one engine until it is asked to stop, and ends the process."""
    member_id = new_member_id(given.pool)
    try:
        logs.configure("rollout", member_id)
        export.configure("rollout", member_id)
        check_pool_option(given.pool, given.engine, given.nodes)
        require_protection(bind_address(host_address()), insecure=given.insecure)
        found = probe(given.engine)
        if not found.ok:
            raise MillraceError(f"engine {given.engine} cannot run here: {found.why}")
        if (place := Place.of(given.engine, given.nodes, given.node_rank, given.leader)) is not None:
            set_network_environment()
        port = place.own_port(given.port) if place is not None else given.port
        short_sockets()
        reached = Reached(
            given.coordinator,
            host_address(),
            port,
            given.metrics_port,
            given.sessions_port,
            given.patience_s,
            given.drain_s,
        )
    except MillraceError as error:
        print(f"rollout: {error}", file=sys.stderr)
        _end(1)
    asyncio.run(_process(member_id, given, (given.engine, found.release), place, reached))


async def _process(
    member_id: MemberId, given: Given, engine: tuple[str, str], place: Place | None, reached: Reached
) -> NoReturn:
    """Serves, and ends the process from inside the event loop: asyncio.run would wait for all of its threads, even for
    one that never returns. `engine`: its name and release. `place`: which node of the replica this process is; None for
    a replica on one host."""
    collect_rarely()
    status = 1
    try:
        if place is not None and place.rank > 0:
            status = await follow(place, engine, signals(), reached.patience_s, reached.drain_s)
        elif given.pool != ROLLOUT:
            status = await serve_pool(PoolReplica(member_id, given.pool, *engine), reached)
        else:
            status = await _serve(member_id, given, engine, place, reached)
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


async def _serve(
    member_id: MemberId, given: Given, engine: tuple[str, str], place: Place | None, reached: Reached
) -> int:
    """Returns the exit status. Raises MillraceError if the coordinator refuses the replica."""
    nodes = None if place is None else Leader(member_id, place, *engine, given.node_lost_s)
    coordinator = Peer(reached.coordinator)
    leases = Leases(coordinator, member_id, admit_by_cache=given.admit_by_cache)
    replica = Replica(member_id, *engine, leases, nodes)
    services = {**servicers(replica), **(nodes_servicers(nodes) if nodes is not None else {})}
    http = SessionServer(replica.sessions, reached.bind, reached.sessions_port, reached.host)
    process = MemberProcess(replica, reached, coordinator, services, replica.metrics, http)
    replica.leases.on_forgotten, replica.leases.on_death = process.membership.forgotten, replica.died_of
    replica.leases.on_job_lost = replica.lose_job
    stops, ending = signals(), Ending.DIED
    await process.start()
    watching = None if nodes is None else asyncio.create_task(nodes.watch())
    try:
        if nodes is None or await meet(nodes, replica, stops, reached.patience_s):
            stalled = watch(replica, given.stall_s, replica.died_of)
            ending = await process.live(stops, needed=[replica.leases.run()], beside=[stalled])
        else:
            ending = Ending.STOPPED
    finally:
        if nodes is not None and watching is not None:
            watching.cancel()
            why = replica.failure or "it was told to stop"
            await nodes.end(why, for_good=ending is Ending.STOPPED and not replica.died.is_set())
    return await process.stop()
