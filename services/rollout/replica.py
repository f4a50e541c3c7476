"""One replica: the job that it serves, its engine, the version that is in place."""

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import structlog

from millrace import hub
from millrace.contracts.v1 import fleet_pb2, rollout_pb2, weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import JobId, MemberId, Version
from millrace.spec import JobSpec, received
from millrace.telemetry.metrics.prometheus import replica as names
from millrace.telemetry.metrics.prometheus.members import RECEIVER_PHASES, record_publication
from millrace.telemetry.spans.batches import taken
from millrace.telemetry.spans.kinds import LaneKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Manifest
from millrace.wire.enums import missing_messages
from services.rollout.engine import Engine, EngineDied, EngineStats, Load
from services.rollout.engines import create, import_errors, import_transformers
from services.rollout.engines.options import check_images, differing_needs, engine_needs
from services.rollout.environments.runner import EnvironmentEpisodes
from services.rollout.judges.client import JudgeClient
from services.rollout.judges.scorer import JudgeScorer
from services.rollout.member.member import CLOSE_S, FleetMember, MemberMetrics
from services.rollout.nodes.leader import Leader
from services.rollout.sessions.episodes import AgentEpisodes, check_allowed
from services.rollout.sessions.hosted import HostedEpisodes
from services.rollout.sessions.open_sessions import OpenSessions, SessionMetrics
from services.rollout.user_process.pool import NoProcessLeft
from services.rollout.weights.receiver import PublicationReceiver
from services.rollout.work.groups import GroupGenerator
from services.rollout.work.job import Job
from services.rollout.work.leases import Leases

log = structlog.get_logger(__name__)
CONFIGURED = "configured"
"""Event of the log, for benchmarks."""
COUNTED = (
    names.PROMPT_TOKENS,
    names.CACHED_PROMPT_TOKENS,
    names.PREEMPTIONS,
    names.PREFIX_TOKENS,
    names.CACHED_PREFIX_TOKENS,
)
"""What the engine and the admission of episodes count, in the order of `ReplicaMetrics._count`."""


@dataclass(frozen=True)
class EngineOrigin:
    """Tells whether the engine of the configured job was started for it or kept."""

    kept: bool = False
    """It is the one of the job before."""
    changes: Sequence[str] = ()
    """The fields in which the job before needed another engine, which was stopped."""


class Replica(FleetMember):
    """Configured by the coordinator. It takes leases as soon as a first version is committed."""

    def __init__(
        self,
        member_id: MemberId,
        engine_name: str,
        engine_release: str,
        leases: Leases,
        nodes: Leader | None = None,
    ) -> None:
        """`nodes`: the other hosts on which its engine lies; None for an engine on this host alone."""
        super().__init__(member_id, engine_name, engine_release)
        self.leases = leases
        self.nodes = nodes
        self.metrics = ReplicaMetrics(self)
        self.sessions = OpenSessions(self.metrics.sessions)
        self.engine: Engine | None = None
        self.job: Job | None = None
        self._receiver: PublicationReceiver | None = None
        self._generator: GroupGenerator | None = None
        self._needs: Mapping[str, Any] = {}
        """What the engine was started for: see `engine_needs`."""
        self._origin = EngineOrigin()
        self._turn = asyncio.Lock()
        self._leaving: asyncio.Task[None] | None = None

    async def configure(self, job_id: JobId, spec_json: str) -> rollout_pb2.ConfigureRolloutResponse:
        """Makes the engine ready for a job. For the job that is configured already it answers at once, and the version
        stays in place. Raises InvalidJob, InvalidState while draining, EngineDied."""
        started = time.monotonic()
        async with self._turn:
            # An engine loads no weights: the first publication brings them.
            spec = await asyncio.to_thread(hub.local, received(spec_json))
            if self.draining.is_set():
                raise InvalidState(f"{self.member_id} drains.", "configure another replica.")
            check_allowed(spec.rollout.agent, os.environ)
            check_images(spec, self.engine_name)
            if self.job is None or (self.job.id, self.job.spec) != (job_id, spec):
                await self._leave_job("another job was configured")
                if self.nodes is not None:
                    self.nodes.serve_job(spec_json)
                try:
                    await self._enter_job(job_id, spec)
                except Exception as error:
                    self.state, self.failure = rollout_pb2.ENGINE_STATE_FAILED, str(error)
                    raise
            assert self.engine is not None and self._receiver is not None
            return rollout_pb2.ConfigureRolloutResponse(
                world_size=self.engine.world_size,
                dtype=self.engine.dtype,
                seconds=time.monotonic() - started,
                has_base=self._receiver.has_base,
                missing_boundaries=self.missing_boundaries,
                kept_engine=self._origin.kept,
                engine_changes=self._origin.changes,
            )

    async def _enter_job(self, job_id: JobId, spec: JobSpec) -> None:
        self.state, self.failure = rollout_pb2.ENGINE_STATE_STARTING, ""
        needs = await asyncio.to_thread(engine_needs, spec, self.engine_name)
        changes = differing_needs(self._needs, needs) if self.engine is not None else []
        if changes:
            await self._stop_engine()
        self._origin = EngineOrigin(kept=self.engine is not None, changes=changes)
        await asyncio.to_thread(import_transformers)
        opening = asyncio.create_task(Job.open(job_id, spec, self.leases.coordinator))
        try:
            if self.engine is None:
                self.engine = create(self.engine_name, self.nodes)
                with import_errors(self.engine_name):
                    await self.engine.start(spec)
                self._needs = needs
            else:
                await self.engine.forget_job()
            self.job = await opening
        except Exception:
            await self._discard(opening)
            await self._stop_engine()
            raise
        self._receiver = PublicationReceiver(
            self.engine, self.member_id, spec.rollout.cache_policy, self._on_version, self.metrics.published
        )
        self.state = rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS
        kept = self._origin.kept
        log.info(CONFIGURED, job=job_id, engine=self.engine.name, release=self.engine.release, kept_engine=kept)

    async def _discard(self, opening: asyncio.Task[Job]) -> None:
        await asyncio.wait([opening])
        if opening.exception() is None:
            await opening.result().close()

    async def _leave_job(self, reason: str) -> None:
        self.version = None
        self.leases.serve(None)
        await self.leases.release(reason)
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            await receiver.close()
        if self.job is not None:
            job, self.job = self.job, None
            await job.close()

    def lose_job(self, error: NoProcessLeft) -> None:
        """Leaves the job, as no process with its user's code is left. The coordinator hears that no version is in place
        and configures the replica again, which starts the processes or says why not."""
        self.leases.serve(None)
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._leave_lost_job(error))

    async def _leave_lost_job(self, error: NoProcessLeft) -> None:
        lost = self.job
        async with self._turn:
            if self.job is lost and lost is not None:
                log.error("the job is left", job=lost.id, reason=str(error))
                self.state, self.failure = rollout_pb2.ENGINE_STATE_FAILED, str(error)
                await self._leave_job("no process with the user's code is left")

    async def _stop_engine(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await engine.stop()

    def _on_version(self, version: Version | None) -> None:
        """A commit ended: with `version` in place, or with None if it failed half-way."""
        self.version = version
        if version is None:
            self.state = rollout_pb2.ENGINE_STATE_WITHOUT_WEIGHTS
            self.leases.serve(None)
            return
        assert self.engine is not None and self.job is not None
        if not self.draining.is_set():
            self.state = rollout_pb2.ENGINE_STATE_SERVING
            self.leases.serve(self.generator())

    def generator(self) -> GroupGenerator:
        """What generates groups for the current job. Raises InvalidState if no version is in place."""
        if self.engine is None or self.job is None or self.version is None:
            what = f"{self.member_id} holds no verified version and generates nothing."
            raise InvalidState(what, "configure it and publish a version to it.")
        if self._generator is None or self._generator.job is not self.job:
            self._generator = GroupGenerator(self.member_id, self.engine, self.job)
            if (run := self._episodes(self.job)) is not None:
                self._generator = replace(self._generator, run_episode=run, most_episodes=run.most_episodes)
                if run.most_episodes < self.engine.capacity:
                    log.warning(
                        "fewer episodes run at once than the engine has slots",
                        episodes=run.most_episodes,
                        slots=self.engine.capacity,
                        fix="raise processes or episodes_per_process of rollout.environment, or rollout.agent.sessions",
                    )
        return self._generator

    def _episodes(self, job: Job) -> EnvironmentEpisodes | HostedEpisodes | AgentEpisodes | None:
        """What runs the episodes of a job; None if an episode is one answer."""
        if job.chat is None:
            return None
        if job.environments is not None:
            return EnvironmentEpisodes(job.environments, job.chat, job.spec)
        hosted = job.spec.rollout.environment is not None
        return (HostedEpisodes if hosted else AgentEpisodes).of_job(job.spec, job.chat, self.sessions)

    def receiver(self, job_id: str) -> PublicationReceiver:
        """Raises InvalidState if the replica is not configured for that job."""
        if self._receiver is None or self.job is None or self.job.id != job_id:
            held = self.job.id if self.job else "no job"
            raise InvalidState(f"{self.member_id} is configured for {held}, not for {job_id}.", "configure it first.")
        return self._receiver

    async def describe(self, request: rollout_pb2.DescribeReceiveRequest) -> rollout_pb2.DescribeReceiveResponse:
        """The part of a manifest that each worker of the engine wants. Raises PublicationFailed if the manifest does
        not fit the engine."""
        self.receiver(request.job_id)
        assert self.engine is not None
        try:
            manifest = Manifest.from_proto(request.manifest)
        except ValueError as error:
            raise PublicationFailed(f"{error}.", "run the same release of millrace everywhere.") from error
        boxes, hosts = await self.engine.describe(manifest), await self.engine.hosts()
        return rollout_pb2.DescribeReceiveResponse(
            layouts=wire_layouts.encode(boxes, hosts), gpu=self.engine.device != "cpu", deltas=True
        )

    def take_no_work(self) -> None:
        """Takes no new leases; work in progress continues."""
        self.leases.serve(None)

    def died_of(self, error: EngineDied) -> None:
        super().died_of(error)
        self.leases.serve(None)

    async def explain_death(self) -> None:
        """Puts the nodes that died with the engine into the failure: an engine notices their end before their leader
        does, and cannot name them."""
        if self.nodes is not None and (silent := await self.nodes.silent()):
            lost = " and ".join(silent)
            self.failure = f"{lost} of the replica is lost: nothing came since the engine failed: {self.failure}"
            log.error("nodes are lost", nodes=silent)

    @property
    def missing_boundaries(self) -> list[rollout_pb2.MissingBoundary]:
        """What separates the job's reward functions and environment from this replica less than it should."""
        return missing_messages(self.job.scoring.missing if self.job else ())

    @property
    def judges(self) -> Sequence[JudgeScorer]:
        """The judges of its job."""
        return self.job.judges if self.job is not None else ()

    @property
    def ready_engine(self) -> Engine | None:
        """The engine, while it is neither starting nor stopping; None otherwise."""
        return None if self.job is None or self._turn.locked() else self.engine

    @property
    def loaded_engine(self) -> Engine | None:
        return self.engine

    @property
    def job_name(self) -> str:
        return self.job.id if self.job is not None else ""

    @property
    def tokens(self) -> int:
        return self.leases.generated_tokens

    @property
    def further_hosts(self) -> Sequence[str]:
        return self.nodes.hosts if self.nodes is not None else ()

    @property
    def stats(self) -> EngineStats | None:
        """What the engine's scheduler says; None if there is no engine, or it said nothing."""
        return self.engine.stats() if self.engine is not None else None

    @property
    def cache_used(self) -> float | None:
        return stats.cache_used if (stats := self.stats) is not None else None

    def load(self) -> Load:
        """Samples in the engine."""
        if self.engine is None:
            return Load(0, 0)
        try:
            return self.engine.load()
        except EngineDied as error:
            self.died_of(error)
            return Load(0, 0)

    def room(self, load: Load) -> int:
        """Samples that the engine could start now, beside `load`."""
        if self.engine is None or self.died.is_set():
            return 0
        return max(0, self.engine.capacity - load.running - load.waiting)

    def heartbeat(self) -> fleet_pb2.HeartbeatRequest:
        """What it is now, with spans and with judges that do not answer."""
        request = super().heartbeat()
        request.free = self.room(Load(request.running, request.waiting))
        request.judge_outages.extend(outage for judge in self.judges if (outage := judge.outage_message()) is not None)
        request.spans, request.span_count = taken(RECORDER, self.member_id, LaneKind.ROLLOUT)
        return request

    async def finish(self) -> None:
        """Waits until no lease is held."""
        await self.leases.finish()

    async def close(self) -> None:
        """Ends all work, returns the leases that are still held, stops the engine. An engine that does not stop within
        CLOSE_S is left for the caller to kill."""
        self.usage.stop()
        try:
            async with asyncio.timeout(CLOSE_S), self._turn:
                await self._leave_job("the replica ends")
                await self._stop_engine()
        except TimeoutError:
            log.warning("the engine did not stop in time and is killed", seconds=CLOSE_S)


class ReplicaMetrics(MemberMetrics):
    """What Prometheus reads of one replica."""

    def __init__(self, replica: "Replica") -> None:
        super().__init__(replica)
        self.sessions = SessionMetrics(self.registry)
        self._replica = replica
        self._counted = [0] * len(COUNTED)
        """What had been counted of each of `COUNTED` the last time."""
        self._counted_requests = WeakKeyDictionary[JudgeClient, Mapping[str, int]]()

    def published(self, report: weights_pb2.MemberReport) -> None:
        """Records the replica's part in a publication that it has committed."""
        record_publication(self.registry, report, RECEIVER_PHASES)

    def refresh(self) -> None:
        super().refresh()
        replica, stats = self._replica, self._replica.stats
        if stats is not None:
            names.ENGINE_RUNNING.on(self.registry).set(stats.running)
            names.ENGINE_WAITING.on(self.registry).set(stats.waiting)
        names.ENGINE_CACHE_USED.on(self.registry).set(math.nan if stats is None else stats.cache_used)
        self._count(stats or EngineStats(0, 0, 0.0))
        names.ENGINE_CAPACITY.on(self.registry).set(replica.engine.capacity if replica.engine is not None else 0)
        names.ENGINE_SLOTS.on(self.registry).set(replica.leases.slots)
        admission = replica.leases.admission
        names.EPISODE_LIMIT.on(self.registry).set(admission.limit or 0)
        names.EPISODES_OPEN.on(self.registry).set(admission.active)
        names.EPISODES_HELD_BACK.on(self.registry).set(admission.waiting)
        names.LEASES_HELD.on(self.registry).set(replica.leases.held)
        self.sessions.show(len(replica.sessions), replica.sessions.waiting)
        for judge in replica.judges:
            self._record(judge.client)

    def _count(self, stats: EngineStats) -> None:
        """Adds what the engine and its episodes have got since the last time. An engine that was started anew counts
        from 0, and so does the admission of another job."""
        admission = self._replica.leases.admission
        of_episodes = admission.prefix_tokens, admission.cached_prefix_tokens
        now = [stats.prompt_tokens, stats.cached_prompt_tokens, stats.preempted, *of_episodes]
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
