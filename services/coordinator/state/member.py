"""One member of the fleet, as the coordinator knows it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from millrace.contracts.v1 import fleet_pb2
from millrace.errors import MillraceError
from millrace.ids import JobId, MemberId, Version
from millrace.rest import GpuView, HostView, MemberKind, MemberState, MemberView
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.sandbox.boundaries import Boundary
from millrace.spec.pool import ROLLOUT
from millrace.wire.enums import fields_of
from services.coordinator.state.faults import place_of

KINDS = {
    fleet_pb2.MEMBER_KIND_TRAINER: MemberKind.TRAINER,
    fleet_pb2.MEMBER_KIND_ROLLOUT: MemberKind.ROLLOUT,
}
HEARTBEATS_PER_S = 100.0
"""Most heartbeats a second of all members together, as far as LONGEST_HEARTBEAT_S allows. Each takes about 0.4 ms of
the coordinator's processor time."""
LONGEST_HEARTBEAT_S = 10.0
MISSED = 2.0
"""Intervals by which the time until a member is lost grows, when the interval between heartbeats does."""
LONGEST_RETRY_S = 60.0
"""Longest wait before a member that fails repeatedly is tried again."""


@dataclass(frozen=True)
class Patience:
    """The intervals of a fleet."""

    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0

    def of_fleet(self, members: int) -> "Patience":
        """The intervals for a fleet of `members`; these are for a small one."""
        heartbeat_s = max(self.heartbeat_s, min(members / HEARTBEATS_PER_S, LONGEST_HEARTBEAT_S))
        return Patience(heartbeat_s, self.lost_after_s + MISSED * (heartbeat_s - self.heartbeat_s))


@dataclass(frozen=True)
class Weights:
    """A verified weight version. Versions of another job or lineage are different weights."""

    job_id: JobId
    lineage: int
    version: Version


@dataclass(frozen=True)
class Configured:
    """The job that a replica's engine is ready for."""

    job_id: JobId
    world_size: int
    dtype: str
    spec: str = ""
    """Digest of the job's spec at that time. A resumed job may have another one."""
    has_base: bool = False
    """Whether the engine holds the base of the job's adapter: publications bring it the adapter only."""
    missing_boundaries: Mapping[Boundary, str] = field(default_factory=dict)
    """What the sandbox of the job's reward functions lacks on its host, and why."""


@dataclass(frozen=True)
class Unconfigured:
    """Why a replica could not be configured for a job."""

    job_id: JobId
    spec: str
    """Digest of the job's spec."""
    error: MillraceError
    refused: bool
    """Whether the replica refused the job as invalid. Otherwise something failed that may work the next time."""
    of_weights: bool = False
    """It refused the weights, after it had accepted the job, and no replica ever took them."""
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Pulse:
    """The last heartbeat, with the numbers of samples that run, wait, and could be started."""

    at: float = field(default_factory=time.monotonic)
    running: int = 0
    waiting: int = 0
    free: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    version: int = -1
    """The version that the member reported. For a replica, `Member.weights` is what counts."""
    judge_outages: Sequence[fleet_pb2.JudgeOutage] = ()
    """Judges that do not answer a replica."""
    usage: fleet_pb2.MemberUsage = field(default_factory=fleet_pb2.MemberUsage)
    """What it uses of its hosts and GPUs."""

    def next(self, beat: fleet_pb2.HeartbeatRequest) -> "Pulse":
        now = time.monotonic()
        grown = max(0, beat.tokens - self.tokens) / max(now - self.at, 1e-3) if self.tokens else 0.0
        smooth = 0.7 * self.tokens_per_s + 0.3 * grown
        outages = tuple(beat.judge_outages)
        return Pulse(
            *(now, beat.running, beat.waiting, beat.free, beat.tokens, smooth, beat.version, outages, beat.usage)
        )


@dataclass
class Member:
    """A member. All but the heartbeat, failures and pending work is kept in the store."""

    id: MemberId
    kind: MemberKind
    address: str
    release: str
    engine: str
    engine_release: str
    world_size: int
    host: str
    device: str
    metrics_port: int = 0
    """Port on the host of `address` at which it serves Prometheus metrics; 0: nowhere."""
    sessions_port: int = 0
    """Port on the host of `address` at which agents reach their sessions; 0: nowhere."""
    pool: str = ROLLOUT
    """The pool of a replica."""
    partition: str = DEFAULT_PARTITION
    """The partition that it works in."""
    home: str = ""
    """The partition that it was started for, where it stays; empty: it named none, and may be handed over to another
    one than the default."""
    came_from: str = ""
    """The partition that handed it over, until it is ready for the job here: then it has returned its leases there."""
    joined_s: float = field(default_factory=time.time)
    """Unix time at which it joined the fleet, or was handed over."""
    draining: bool = False
    trains: bool = False
    """Whether it is the trainer that the loop of a job calls: the job asks it for a checkpoint before it leaves."""
    configured: Configured | None = None
    weights: Weights | None = None
    weights_at: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)
    heard_at: float = 0.0
    """The last sign of life other than a heartbeat: a request or an answer."""
    lost_after_s: float = 0.0
    """Seconds without a heartbeat before the member counts as lost. Follows the interval last sent to it."""
    probed_at: float = 0.0
    """When its address was tried last, because it was silent."""
    configuring: bool = False
    failures: int = 0
    """Configurations and publications that failed in a row."""
    retry_at: float = 0.0
    unconfigured: Unconfigured | None = None
    """Why the last configuration failed. None after one that succeeded."""
    left: bool = False
    """Whether it said that it leaves, and not because something in it failed."""
    why_gone: str = ""
    """Why it is lost or has left."""
    last_words: str = ""
    """How its process ended and what it wrote last, if its next life has reported it."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the member is lost or has left."""

    @classmethod
    def of(cls, request: fleet_pb2.RegisterRequest) -> Self:
        return cls(
            id=MemberId(request.member_id),
            kind=KINDS[request.kind],
            address=request.address,
            release=request.release,
            engine=request.engine,
            engine_release=request.engine_release,
            world_size=request.world_size,
            host=request.host,
            device=request.device,
            metrics_port=request.metrics_port,
            sessions_port=request.sessions_port,
            pool=request.pool or ROLLOUT,
            partition=request.partition or DEFAULT_PARTITION,
            home=request.partition,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields that survive a restart of the coordinator."""
        names = (
            "id",
            "kind",
            "address",
            "release",
            "engine",
            "engine_release",
            "world_size",
            "host",
            "device",
            "metrics_port",
            "sessions_port",
            "pool",
        )
        tree: dict[str, Any] = {name: getattr(self, name) for name in (*names, "joined_s", "draining")}
        if self.partition != DEFAULT_PARTITION:  # a coordinator of an earlier release does not know the field
            tree["partition"] = self.partition
        if self.home != _usual_home(tree):
            tree["home"] = self.home
        tree["configured"] = vars(self.configured) if self.configured else None
        tree["weights"] = vars(self.weights) if self.weights else None
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        configured = Configured(**tree["configured"]) if tree["configured"] else None
        weights = Weights(**tree["weights"]) if tree["weights"] else None
        made = {"kind": MemberKind(tree["kind"]), "configured": configured, "weights": weights}
        return cls(**{"home": _usual_home(tree), **tree, **made})

    @property
    def leaves(self) -> bool:
        """Whether it was asked to leave, and drains or has left."""
        return self.left or (self.draining and not self.gone.is_set())

    @property
    def died(self) -> bool:
        """Whether it is gone, and not because somebody asked it to leave."""
        return self.gone.is_set() and not self.left

    @property
    def place(self) -> str:
        """The place of its process. The next life of the process has the same one."""
        return place_of(self.pool, self.address)

    def ready_for(self, job_id: JobId) -> bool:
        """Whether its engine can generate for the job, as soon as it has the weights."""
        return self.configured is not None and self.configured.job_id == job_id and not self.gone.is_set()

    def failed_at(self, job_id: JobId, spec: str) -> Unconfigured | None:
        """Why it could not be configured for the job with this spec; None if that did not happen."""
        last = self.unconfigured
        return last if last is not None and (last.job_id, last.spec) == (job_id, spec) else None

    def failed(self) -> None:
        """A configuration or a publication has failed: the next one waits, longer each time."""
        self.failures += 1
        self.retry_at = time.monotonic() + min(LONGEST_RETRY_S, 2.0**self.failures)

    @property
    def due(self) -> bool:
        """False for a while after a failure, longer each time: the member is not tried again until then."""
        return time.monotonic() >= self.retry_at

    def holds(self, wanted: Weights) -> bool:
        return self.weights == wanted

    @property
    def state(self) -> MemberState:
        if self.gone.is_set():
            return MemberState.LEFT if self.left and self.draining else MemberState.LOST
        if self.draining:
            return MemberState.DRAINING
        if self.configuring:
            return MemberState.CONFIGURING
        if self.kind is MemberKind.TRAINER:
            return MemberState.SERVING
        if self.weights is not None or (self.pool != ROLLOUT and self.configured is not None):
            return MemberState.SERVING
        return MemberState.JOINING if self.configured else MemberState.IDLE

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - max(self.pulse.at, self.heard_at)

    @property
    def _version(self) -> int:
        if self.kind is MemberKind.TRAINER:
            return self.pulse.version
        return self.weights.version if self.weights else -1

    @property
    def sessions_address(self) -> str:
        """host:port of its HTTP endpoint; empty if it has none."""
        return self._at(self.sessions_port)

    def _at(self, port: int) -> str:
        """host:port of another server of the member; empty if it has none."""
        return f"{self.address.rpartition(':')[0]}:{port}" if port else ""

    def view(self, leases: int) -> MemberView:
        usage = self.pulse.usage
        return MemberView(
            id=self.id,
            kind=self.kind,
            pool=self.pool if self.kind is MemberKind.ROLLOUT else "",
            partition=self.partition,
            address=self.address,
            engine=self.engine,
            engine_release=self.engine_release,
            world_size=self.world_size,
            host=self.host,
            device=self.device,
            metrics_address=self._at(self.metrics_port),
            sessions_address=self.sessions_address,
            state=self.state,
            version=self._version,
            running=self.pulse.running,
            waiting=self.pulse.waiting,
            free=self.pulse.free,
            leases=leases,
            tokens=self.pulse.tokens,
            tokens_per_s=self.pulse.tokens_per_s,
            cache_used=usage.cache_used if usage.HasField("cache_used") else None,
            hosts=[HostView(**fields_of(one)) for one in usage.hosts],
            gpus=[GpuView(**fields_of(one)) for one in usage.gpus],
            silent_s=self.silent_s,
            missing_boundaries=dict(self.configured.missing_boundaries) if self.configured else {},
            trouble=str(self.unconfigured.error) if self.unconfigured is not None else "",
            gone=self.why_gone,
        )


def _usual_home(tree: Mapping[str, Any]) -> str:
    """The home of a member that was not handed over, from its stored fields: they name a partition that it named, with
    the exception of the default one."""
    return str(tree.get("partition", ""))
