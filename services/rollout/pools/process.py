"""A pool's replica as a process: from its registration to its end."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

from millrace.errors import InvalidState
from millrace.spec.pool import LONGEST_NAME, NAME, ROLLOUT
from millrace.telemetry.metrics.prometheus.endpoint import MetricsEndpoint
from millrace.telemetry.metrics.prometheus.every_service import grpc_observer
from millrace.wire.address import bind_address
from millrace.wire.channel import Peer, token
from millrace.wire.membership import Membership
from millrace.wire.server import Server
from services.rollout.engines import create_scoring
from services.rollout.member.endpoint import HttpEndpoint
from services.rollout.pools.endpoint import application
from services.rollout.pools.metrics import PoolMetrics
from services.rollout.pools.replica import PoolReplica
from services.rollout.pools.service import servicers


@dataclass(frozen=True)
class PoolProcess:
    """How a pool's replica is reached, and how long it is patient."""

    coordinator: str
    host: str
    port: int
    metrics_port: int
    sessions_port: int
    patience_s: float
    drain_s: float


def check_pool_option(pool: str, engine: str, nodes: int) -> None:
    """Checks the option --pool of a replica's process. Raises NotFound and InvalidState."""
    if pool == ROLLOUT:
        return
    if re.fullmatch(NAME, pool) is None or len(pool) > LONGEST_NAME:
        fix = "use small letters, digits, _ and -, as in the job's pools."
        raise InvalidState(f"--pool: {pool}: is not the name of a pool.", fix)
    create_scoring(engine)
    if nodes > 1:
        raise InvalidState("--nodes: a replica of a pool lies on one host.", "leave it out.")


async def serve(replica: PoolReplica, process: PoolProcess, stops: asyncio.Queue[int]) -> int:
    """Serves until the replica is told to stop, or its engine dies; returns the exit status. Raises MillraceError where
    the coordinator refuses the replica."""
    coordinator, bind = Peer(process.coordinator), bind_address(process.host)
    metrics = PoolMetrics(replica)
    server = Server(servicers(replica), bind, process.port, observe=grpc_observer(metrics.registry))
    endpoint = MetricsEndpoint(metrics.registry, bind, process.metrics_port, metrics.refresh)
    replica.metrics_port = endpoint.port
    http = HttpEndpoint(application(replica, token()), bind, process.sessions_port)
    replica.sessions_port = http.port
    membership = replica.membership(coordinator, f"{process.host}:{server.port}", process.patience_s)
    await server.start()
    http.start()
    beating = asyncio.create_task(membership.run())
    try:
        await _first(beating, stops.get, replica.draining.wait, replica.died.wait)
        if beating.done():
            beating.result()
        if not replica.died.is_set():
            await _drain(replica, membership, stops, process.drain_s)
    finally:
        await server.healthy(False)
        await replica.close()
        beating.cancel()
    await membership.leave(replica.failure or "it was told to stop", failed=replica.died.is_set())
    await http.stop()
    await server.stop(1.0)
    endpoint.close()
    await coordinator.close()
    return 1 if replica.died.is_set() else 0


async def _drain(replica: PoolReplica, membership: Membership, stops: asyncio.Queue[int], drain_s: float) -> None:
    """Answers the calls in progress. A second signal, or `drain_s`, ends that."""
    replica.drain()
    await membership.drain()
    finishing = asyncio.create_task(replica.finish())
    try:
        async with asyncio.timeout(drain_s):
            await _first(finishing, stops.get, replica.died.wait)
    except TimeoutError:
        pass
    finally:
        finishing.cancel()


async def _first(task: "asyncio.Task[None]", *others: Callable[[], object]) -> None:
    """Waits until the task or one of the others has ended, and cancels the others."""
    waiting = [asyncio.ensure_future(other()) for other in others]  # type: ignore[call-overload]
    await asyncio.wait({task, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
