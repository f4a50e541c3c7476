"""The replica's page for Prometheus. Its metrics are declared in millrace/telemetry/metrics/prometheus."""

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from millrace.contracts.v1 import fleet_pb2, weights_pb2
from millrace.ids import MemberId, Version
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import replica as names
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.members import (
    MEMBER_TOKENS,
    RECEIVER_PHASES,
    describe_gpus,
    describe_member,
    record_publication,
)
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.usage import UsageMonitor
from services.rollout.engine import Engine, EngineStats, Load
from services.rollout.judges.client import JudgeClient
from services.rollout.judges.scorer import JudgeScorer
from services.rollout.sessions.metrics import SessionMetrics
from services.rollout.sessions.open_sessions import OpenSessions
from services.rollout.work.job import Job
from services.rollout.work.leases import Leases

HOST = platform.node()


COUNTED = (names.PROMPT_TOKENS, names.CACHED_PROMPT_TOKENS, names.PREEMPTIONS)


class Observed(Protocol):
    """A replica."""

    member_id: MemberId
    engine_name: str
    engine_release: str
    engine: Engine | None
    job: Job | None
    version: Version | None
    leases: Leases
    sessions: OpenSessions

    @property
    def judges(self) -> Sequence[JudgeScorer]:
        """The judges of its job."""

    @property
    def takes_leases(self) -> bool:
        """Whether it does not drain."""

    def load(self) -> tuple[Load, int]:
        """Samples in the engine, and how many more it could start now."""


class ReplicaMetrics:
    """What Prometheus reads of one replica."""

    def __init__(self, replica: Observed) -> None:
        self.registry = DeclaredRegistry(Owner.REPLICA)
        describe_process(self.registry, Owner.REPLICA)
        self.sessions = SessionMetrics(self.registry)
        self._replica = replica
        self._counted_tokens = 0
        self._counted = (0, 0, 0)
        """What the engine had told of each of `COUNTED` the last time."""
        self._counted_requests = WeakKeyDictionary[JudgeClient, Mapping[str, int]]()
        self._usage = UsageMonitor(HOST)
        self._usage.start()

    def published(self, report: weights_pb2.MemberReport) -> None:
        """Records the replica's part in a publication that it has committed."""
        record_publication(self.registry, report, RECEIVER_PHASES)

    def usage(self) -> fleet_pb2.MemberUsage:
        """What the replica uses of its host, its GPUs and its engine's cache, for the heartbeat."""
        engine = self._replica.engine
        stats = engine.stats() if engine is not None else None
        return self._usage.message(stats.cache_used if stats is not None else None)

    def stop(self) -> None:
        """Measures no more."""
        self._usage.stop()

    def refresh(self) -> None:
        """Sets every gauge to what the replica is now. On the replica's event loop."""
        replica = self._replica
        load, _ = replica.load()
        stats = replica.engine.stats() if replica.engine is not None else None
        names.ENGINE_RUNNING.on(self.registry).set(load.running if stats is None else stats.running)
        names.ENGINE_WAITING.on(self.registry).set(load.waiting if stats is None else stats.waiting)
        names.ENGINE_CACHE_USED.on(self.registry).set(math.nan if stats is None else stats.cache_used)
        self._count(stats or EngineStats(0, 0, 0.0))
        names.ENGINE_CAPACITY.on(self.registry).set(replica.engine.capacity if replica.engine is not None else 0)
        names.ENGINE_SLOTS.on(self.registry).set(replica.leases.slots)
        names.LEASES_HELD.on(self.registry).set(replica.leases.held)
        describe_gpus(self.registry, [(HOST, reading) for reading in self._usage.gpus.latest])
        names.DRAINING.on(self.registry).set(not replica.takes_leases)
        generated = replica.leases.generated_tokens
        MEMBER_TOKENS.on(self.registry).inc(generated - self._counted_tokens)
        self._counted_tokens = generated
        self.sessions.show(len(replica.sessions), replica.sessions.waiting)
        for judge in replica.judges:
            self._record(judge.client)
        describe_member(
            self.registry,
            member=replica.member_id,
            engine=replica.engine_name,
            engine_release=replica.engine_release,
            job_id=replica.job.id if replica.job is not None else "",
            version=replica.version,
        )

    def _count(self, stats: EngineStats) -> None:
        """Adds what the engine has got since the last time. An engine that was started anew counts from 0."""
        now = (stats.prompt_tokens, stats.cached_prompt_tokens, stats.preempted)
        for metric, before, count in zip(COUNTED, self._counted, now, strict=True):
            metric.on(self.registry).inc(count - before if count >= before else count)
        self._counted = now

    def _record(self, judge: JudgeClient) -> None:
        """Sets what a judge's client is now, and adds what it has asked since the last time."""
        down_s = judge.outage.seconds if judge.outage is not None else 0.0
        names.JUDGE_DOWN.on(self.registry).labels(judge.name).set(down_s)
        names.JUDGE_WAITING.on(self.registry).labels(judge.name).set(judge.waiting)
        counted = self._counted_requests.get(judge, {})
        for outcome, count in judge.asked.items():
            names.JUDGE_REQUESTS.on(self.registry).labels(judge.name, outcome).inc(count - counted.get(outcome, 0))
        self._counted_requests[judge] = dict(judge.asked)
