"""The coordinator as one process: its components, how it starts, how it stops."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from millrace.local.folders import new_private_folder
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.telemetry.metrics.prometheus.every_service import grpc_observer
from millrace.wire.address import host_address, host_name
from millrace.wire.http_server import GRACE_S, HttpServer, listening
from millrace.wire.server import LARGEST_GROUP_BYTES, Server
from millrace.wire.tls import identity, scheme
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.deletion import Retention
from services.coordinator.jobs.placing import JobViews, Placing
from services.coordinator.jobs.runner import run_partitions
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.observe.span_store import SpanStore
from services.coordinator.redis_server import RedisServer, locked
from services.coordinator.rest.app import application
from services.coordinator.scaling.autoscaler import Autoscaler, Scaling
from services.coordinator.scaling.scalers import Scaler
from services.coordinator.scaling.sharing import Sharing
from services.coordinator.servicers import FleetServicer, WorkServicer, servicers
from services.coordinator.stages.run import Shared
from services.coordinator.standby import Standby, bound
from services.coordinator.state.bell import Bell
from services.coordinator.state.member import Patience
from services.coordinator.state.waiting import Preemption, Quota
from services.coordinator.store import Holder, Store, StoreDown, Superseded
from services.coordinator.webhooks import Hook, Webhooks
from services.coordinator.work.queue import Queues

log = structlog.get_logger(__name__)
REDIS_START_S = 10.0
"""How long the Redis of REDIS_URL may take to answer at start."""


@dataclass(frozen=True)
class Settings:
    http_host: str
    http_port: int
    grpc_host: str
    grpc_port: int
    state_dir: Path
    redis_url: str
    """Empty: the embedded Redis, in the state folder."""
    patience: Patience
    retention: Retention
    """Which jobs that have ended are kept."""
    lease_s: float = 3.0
    """How long a coordinator leads after it was heard by Redis last."""
    autoscale: tuple[Scaler, Scaling] | None = None
    """What starts and stops the replicas of `rollout`, and by what rules; None: they are not scaled."""
    jobs_per_user: int = 0
    """Most active jobs of one user; 0: no limit."""
    preempt_after_s: float = 0.0
    """Seconds that a job runs after each start before it gives way to one that asks for it; 0: none does."""
    share_replicas_s: float = 0.0
    """Seconds between two hand-overs of replicas to jobs of other partitions, at least; 0: there are none."""
    webhook: Hook | None = None
    """Webhook that gets messages about every job; None: only the webhooks of jobs get some."""


class Coordinator:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis: RedisServer | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Stands by, leads, and stands by again when another coordinator leads, until `stop` is set. Raises
        Unavailable or InvalidState if it cannot start or continue."""
        with contextlib.ExitStack() as held:
            http = held.enter_context(listening(self._settings.http_host, self._settings.http_port, "--http-port"))
            url = self._settings.redis_url or await self._embedded(held)
            try:
                first = True
                while not stop.is_set():
                    await self._term(url, http, stop, first=first)
                    first = False
            finally:
                if self._redis is not None:
                    await self._redis.stop()

    async def _term(self, url: str, http: socket.socket, stop: asyncio.Event, *, first: bool) -> None:
        """One term: the wait for the lease, and the time until its end."""
        settings, store = self._settings, Store(url)
        own = _holder(settings, http)
        standby = Standby(own, (settings.grpc_host, settings.grpc_port), http, settings.lease_s)
        try:
            answers = asyncio.create_task(_redis_answers(store, REDIS_START_S if first else None))
            if await _unless(stop, answers) and await standby.wait(store, stop, back=first):
                await self._serve(store, http, stop)
        except (Superseded, StoreDown) as error:
            log.warning("this coordinator leads no more", error=str(error))
        finally:
            await store.close()

    async def _embedded(self, held: contextlib.ExitStack) -> str:
        folder = self._settings.state_dir / "redis"
        new_private_folder(self._settings.state_dir)
        held.enter_context(locked(self._settings.state_dir / "lock"))
        self._redis = RedisServer(folder)
        await self._redis.start()
        return self._redis.url

    async def _serve(self, store: Store, http: socket.socket, stop: asyncio.Event) -> None:
        prometheus, control_bell = PrometheusMetrics(), Bell()
        events = Events(store, prometheus.happened)
        store.connection.observe = prometheus.asked_redis
        fleet = Fleet(store, self._settings.patience)
        await fleet.load()
        queues = Queues(fleet)
        spans = SpanStore(store, prometheus, queues.place)
        services = servicers(FleetServicer(fleet, queues, spans), WorkServicer(fleet, queues, store, prometheus))
        observe = grpc_observer(prometheus.registry)
        at = (self._settings.grpc_host, self._settings.grpc_port)
        grpc = await bound(lambda: Server(services, *at, LARGEST_GROUP_BYTES, observe))
        shared = Shared(
            store=store,
            whole_fleet=fleet,
            queues=queues,
            events=events,
            prometheus=prometheus,
            spans=spans,
            control=control_bell,
            work_address=_work_address(self._settings.grpc_host, grpc.port),
        )
        settings = self._settings
        rules = Quota(settings.jobs_per_user), Preemption(settings.preempt_after_s)
        placing = Placing(shared, *rules, shares_replicas=settings.share_replicas_s > 0)
        await placing.load()
        views = JobViews(placing)
        control = Control(store, events, control_bell, views.waits_for)
        webhooks = Webhooks(shared, views, self._settings.webhook)
        kept = (webhooks.run(), control.deletion.keep_within(self._settings.retention))
        own, app = identity(), application(shared, control, views, webhooks, self._settings.http_host)
        rest = HttpServer(app, certificate_required=own is not None and own.rest_clients_required)
        await grpc.start()
        work = [asyncio.create_task(each) for each in (*self._work(placing), *kept)]
        serving = asyncio.create_task(rest.serve(sockets=[http.dup()]))
        stopping = asyncio.create_task(stop.wait())
        log.info("coordinator started", http=http.getsockname()[:2], grpc=grpc.port, redis=store.connection.name)
        try:
            done, _ = await asyncio.wait({*work, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            log.info("the coordinator stops; jobs continue from here when it is started again")
            for task in (*work, stopping):
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await store.leadership.release()
            queues.close()
            events.close()
            rest.should_exit = True
            await asyncio.gather(serving, grpc.stop(GRACE_S), return_exceptions=True)
            await fleet.close()

    def _work(self, placing: Placing) -> Iterator[Coroutine[Any, Any, None]]:
        """What runs beside the servers for as long as this coordinator leads."""
        settings, shared = self._settings, placing.shared
        yield shared.store.leadership.keep()
        yield shared.whole_fleet.watch()
        yield shared.spans.run()
        if settings.autoscale is not None:
            yield Autoscaler(placing.partitions[DEFAULT_PARTITION], *settings.autoscale).run()
        if settings.share_replicas_s:
            yield Sharing(placing.partitions, shared, settings.share_replicas_s).run()
        yield run_partitions(placing)
        if self._redis is not None:
            yield self._redis.watch()


async def _redis_answers(store: Store, within_s: float | None) -> None:
    """Waits until Redis is up, at most so long; warns of one that may lose data. Raises as `Connection.wait_for`."""
    await store.connection.wait_for(within_s)
    if not await store.connection.is_persistent():
        log.warning(
            "Redis has no append-only file: its data is lost when it ends",
            fix="set appendonly yes in its configuration",
        )
    if await store.connection.evicts():
        log.warning("Redis deletes data when its memory is full", fix="set maxmemory-policy noeviction")


async def _unless(stop: asyncio.Event, work: asyncio.Task[None]) -> bool:
    """Waits for the work, and answers True; cancels it and answers False if `stop` is set before."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return work.done()
    finally:
        for task in (work, stopping):
            task.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)


def _holder(settings: Settings, http: socket.socket) -> Holder:
    """This coordinator, as others reach it."""
    port = http.getsockname()[1]
    return Holder(
        f"{host_name()}:{port}" if settings.redis_url else "of the embedded Redis",
        _work_address(settings.grpc_host, settings.grpc_port),
        f"{scheme()}://{_work_address(settings.http_host, port)}",
    )


def _work_address(host: str, port: int) -> str:
    """host:port of the Work service, as the trainer's ranks reach it."""
    return f"{host_address() if host in ('0.0.0.0', '::', '[::]') else host}:{port}"
