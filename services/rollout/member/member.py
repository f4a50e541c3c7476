"""One member of the fleet: what a replica that generates and a replica of a pool have in common."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

import structlog

import millrace
from millrace.contracts.v1 import fleet_pb2, rollout_pb2
from millrace.ids import MemberId, Version
from millrace.local.host import device_name
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import replica as names
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.members import MEMBER_TOKENS, describe_gpus, describe_member
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.usage import UsageMonitor
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.membership import Membership
from services.rollout.engine import EngineDied, Load

CLOSE_S = 10.0
"""How long a replica may take to return its leases and to stop its engine."""
log = structlog.get_logger(__name__)
State = rollout_pb2.EngineState


class LoadedEngine(Protocol):
    """What the fleet hears of an engine."""

    world_size: int
    device: str


class FleetMember:
    """A replica, as the coordinator sees it. Subclasses say which engine, version and load it has."""

    def __init__(self, member_id: MemberId, engine_name: str, engine_release: str, pool: str = "") -> None:
        """`pool`: the pool that it scores or replies for; empty for a replica that generates."""
        self.member_id = member_id
        self.engine_name = engine_name
        self.engine_release = engine_release
        self.pool = pool
        self.state: State = rollout_pb2.ENGINE_STATE_IDLE
        self.version: Version | None = None
        """The version that is in place; None: none is, or the model never changes."""
        self.failure = ""
        self.metrics_port = 0
        """Port at which the metrics are served; 0: nowhere."""
        self.sessions_port = 0
        """Port of its HTTP endpoint, for agents or judges; 0: nowhere."""
        self.usage = UsageMonitor(socket.gethostname())
        self.usage.start()
        self.draining = asyncio.Event()
        """Set once somebody asked this replica to drain."""
        self.died = asyncio.Event()
        """Set once the engine has died; `failure` says why."""

    # What a subclass says.

    @property
    def loaded_engine(self) -> LoadedEngine | None:
        """The engine, if there is one."""
        raise NotImplementedError

    @property
    def job_name(self) -> str:
        """Id of the job that it serves; empty: none."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Tokens generated or scored since the process started."""
        raise NotImplementedError

    @property
    def further_hosts(self) -> Sequence[str]:
        """The other hosts on which its engine lies."""
        return ()

    @property
    def cache_used(self) -> float | None:
        """Part of the engine's cache that is in use, 0 to 1; None: not known."""
        return None

    def load(self) -> Load:
        """What the engine computes now, and what waits for it."""
        raise NotImplementedError

    def take_no_work(self) -> None:
        """Takes no new work; work in progress continues."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Waits until no work is in progress."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends all work and stops the engine."""
        raise NotImplementedError

    async def explain_death(self) -> None:
        """Adds to `failure` what was found out since the engine died."""

    # What the fleet hears.

    def drain(self) -> None:
        """Takes no new work; work in progress continues. Idempotent."""
        if not self.draining.is_set():
            log.info("draining")
            self.state = rollout_pb2.ENGINE_STATE_DRAINING
            self.take_no_work()
            self.draining.set()

    def died_of(self, error: EngineDied) -> None:
        """The engine has died: the replica fails."""
        if not self.died.is_set():
            log.error("the engine died", error=str(error))
            self.state, self.failure, self.version = rollout_pb2.ENGINE_STATE_FAILED, str(error), None
            self.died.set()

    def membership(self, coordinator: Peer, address: str, patience_s: float) -> Membership:
        """This replica's membership in the fleet. `address`: host:port of its own server, as others reach it."""
        return Membership(
            coordinator, self.member_id, lambda: self.registration(address), self.heartbeat, self.drain, patience_s
        )

    def registration(self, address: str) -> fleet_pb2.RegisterRequest:
        """What it registers with."""
        engine = self.loaded_engine
        return fleet_pb2.RegisterRequest(
            member_id=self.member_id,
            kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
            address=address,
            protocol_version=PROTOCOL_VERSION,
            release=millrace.__version__,
            engine=self.engine_name,
            engine_release=self.engine_release,
            world_size=(engine.world_size if engine is not None else 0) or 1,
            host=", ".join([socket.gethostname(), *self.further_hosts]),
            device=engine.device if engine is not None else device_name(),
            metrics_port=self.metrics_port,
            sessions_port=self.sessions_port,
            pool=self.pool,
        )

    def heartbeat(self) -> fleet_pb2.HeartbeatRequest:
        """What it is now."""
        load = self.load()
        return fleet_pb2.HeartbeatRequest(
            member_id=self.member_id,
            running=load.running,
            waiting=load.waiting,
            version=-1 if self.version is None else self.version,
            tokens=self.tokens,
            usage=self.usage.message(self.cache_used),
        )


class MemberMetrics:
    """The page of one replica."""

    def __init__(self, member: FleetMember) -> None:
        self.registry = DeclaredRegistry(Owner.REPLICA)
        describe_process(self.registry, Owner.REPLICA)
        self._member = member
        self._counted_tokens = 0

    def refresh(self) -> None:
        """Sets every gauge to what the replica is now. On the replica's event loop."""
        member = self._member
        load = member.load()
        names.ENGINE_RUNNING.on(self.registry).set(load.running)
        names.ENGINE_WAITING.on(self.registry).set(load.waiting)
        names.DRAINING.on(self.registry).set(member.draining.is_set())
        describe_gpus(self.registry, [(member.usage.host, reading) for reading in member.usage.gpus.latest])
        tokens = member.tokens
        MEMBER_TOKENS.on(self.registry).inc(tokens - self._counted_tokens)
        self._counted_tokens = tokens
        describe_member(
            self.registry,
            member=member.member_id,
            engine=member.engine_name,
            engine_release=member.engine_release,
            job_id=member.job_name,
            version=member.version,
        )
