"""The page that the coordinator serves for Prometheus. Its metrics are declared in millrace/telemetry/metrics. The
gauges of `JobHealth` show that an active job stands still or goes wrong: the alerts of deploy/prometheus look at them.
"""

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from millrace.contracts.v1 import common_pb2
from millrace.drops import DropReason
from millrace.events import EventKind
from millrace.ids import JobId
from millrace.rest import FleetView, JobState, LedgerView, StepMetrics
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import coordinator as names
from millrace.telemetry.metrics.prometheus.declaration import PrometheusMetric
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.metrics.step.mismatch import K3_KL, K3_KL_SAME_VERSION
from services.coordinator.observe.groups import STOPS
from services.coordinator.state.job import ACTIVE, JobRecord
from services.coordinator.store import Store

DISK_S = 2.0
"""Seconds that a file system has to report its free space. One that does not answer delays no page."""
GAUGES = (
    *(names.JOB_STEP_TIME, names.JOB_CHECKPOINT_TIME, names.JOB_NOT_FINITE, names.JOB_MISMATCH_KL),
    *(names.DISK_FREE, names.DISK_SIZE),
)
LEDGER = ("queued", "leased", "generated", "trained", "dropped")
LATELY_S = 3600.0
"""A job is on the page until this many seconds after its end."""
LATELY = 20
"""Most jobs on the page that have ended."""
OF_A_JOB = (
    *(names.LEASES, names.LEASES_EXPIRED, names.LEASES_FENCED, names.GROUPS, names.TRAJECTORIES),
    *(names.RESPONSE_TOKENS, names.STALENESS, names.STEP_S, names.PAUSE_S),
    *(names.PUBLICATIONS, names.PUBLICATION_S, names.PUBLICATION_BYTES, names.EVENTS),
)
"""Counters and histograms of single jobs. They are removed with their job from the page."""


class JobHealth:
    """Sets the gauges of active jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._asking: dict[str, asyncio.Future[tuple[int, int]]] = {}
        """Questions to file systems that have not been answered, by folder."""

    async def set(self, store: Store, active: Sequence[JobRecord]) -> None:
        """Sets every gauge to what holds now for the jobs `active`. Raises StoreDown."""
        shown = [(job, *await _rows(store, job), await self._disk(job.folder)) for job in active]
        for gauge in GAUGES:
            gauge.on(self._registry).clear()
        for job, last, saved, disk in shown:
            started_s = job.since_s or job.created_s
            self._put(names.JOB_STEP_TIME, job, max(started_s, last.time_s) if last else started_s)
            self._put(names.JOB_CHECKPOINT_TIME, job, max(started_s, saved.time_s) if saved else started_s)
            values = last.values if last else {}
            self._put(names.JOB_NOT_FINITE, job, sum(not math.isfinite(value) for value in values.values()))
            if (mismatch := values.get(K3_KL_SAME_VERSION, values.get(K3_KL))) is not None:
                self._put(names.JOB_MISMATCH_KL, job, mismatch)
            if disk is not None:
                self._put(names.DISK_FREE, job, disk[0])
                self._put(names.DISK_SIZE, job, disk[1])

    def _put(self, gauge: PrometheusMetric[Gauge], job: JobRecord, value: float) -> None:
        gauge.on(self._registry).labels(job_id=job.id).set(value)

    async def _disk(self, folder: str) -> tuple[int, int] | None:
        """Free bytes and size of the file system of `folder`; None if it does not answer."""
        if not folder:
            return None
        if folder not in self._asking:
            self._asking[folder] = asyncio.ensure_future(asyncio.to_thread(_free_and_size, Path(folder)))
        asking = self._asking[folder]
        await asyncio.wait([asking], timeout=DISK_S)
        if not asking.done():
            return None
        del self._asking[folder]
        return None if asking.exception() is not None else asking.result()


async def _rows(store: Store, job: JobRecord) -> tuple[StepMetrics | None, StepMetrics | None]:
    """The rows of the job's last step and of the step of its newest checkpoint; None if there is none."""
    records = store.records(job.id)
    last = await records.rows(job.step - 1, job.step) if job.step > 0 else []
    saved = await records.rows(job.checkpoint_step - 1, job.checkpoint_step) if job.checkpoint_step > 0 else []
    return next(iter(last), None), next(iter(saved), None)


def _free_and_size(folder: Path) -> tuple[int, int]:
    """The folder need not exist yet: its nearest parent counts. Raises OSError."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return usage.free, usage.total


class PrometheusMetrics:
    """Counters and histograms that this process updates, and gauges that are set when the page is requested."""

    def __init__(self) -> None:
        self.registry = DeclaredRegistry(Owner.COORDINATOR)
        describe_process(self.registry, Owner.COORDINATOR)
        self._health = JobHealth(self.registry)
        names.SPANS_DROPPED.on(self.registry)  # on the page from the beginning
        for outcome in ("delivered", "failed"):
            names.WEBHOOKS.on(self.registry).labels(outcome=outcome)
        self._counted: set[JobId] = set()
        """Jobs that may have counters."""

    def happened(self, job_id: JobId, kind: EventKind) -> None:
        """Counts an event."""
        self._counted.add(job_id)
        names.EVENTS.on(self.registry).labels(job_id=job_id, kind=kind).inc()

    def requested(self, method: str, route: str, code: int, seconds: float) -> None:
        """Records a REST request: the time until its answer began."""
        names.HTTP_S.on(self.registry).labels(method=method, route=route, code=code).observe(seconds)

    def dropped_spans(self, count: int) -> None:
        """Counts spans that are not kept."""
        names.SPANS_DROPPED.on(self.registry).inc(count)

    def called_webhook(self, *, delivered: bool) -> None:
        """Counts a message that was delivered or given up."""
        names.WEBHOOKS.on(self.registry).labels(outcome="delivered" if delivered else "failed").inc()

    def asked_redis(self, seconds: float) -> None:
        """Records a command or script in Redis."""
        names.REDIS_S.on(self.registry).observe(seconds)

    def leased(self, job_id: JobId, count: int) -> None:
        """Counts leases that were given to replicas."""
        if count:
            self._counted.add(job_id)
            names.LEASES.on(self.registry).labels(job_id=job_id).inc(count)

    def expired(self, job_id: JobId, count: int) -> None:
        """Counts leases whose replica did not extend them in time."""
        self._counted.add(job_id)
        names.LEASES_EXPIRED.on(self.registry).labels(job_id=job_id).inc(count)

    def fenced(self, job_id: JobId) -> None:
        """Counts an answer that was refused because its lease had been given to another replica."""
        self._counted.add(job_id)
        names.LEASES_FENCED.on(self.registry).labels(job_id=job_id).inc()

    def completed(self, job_id: JobId, group: common_pb2.Group) -> None:
        """Counts a group, its trajectories and its response tokens."""
        self._counted.add(job_id)
        names.GROUPS.on(self.registry).labels(job_id=job_id).inc()
        for stop, count in Counter(t.stop_reason for t in group.trajectories).items():
            names.TRAJECTORIES.on(self.registry).labels(job_id=job_id, stop=STOPS.get(stop, "")).inc(count)
        tokens = sum(len(t.tokens) // 4 for t in group.trajectories)
        names.RESPONSE_TOKENS.on(self.registry).labels(job_id=job_id).inc(tokens)

    def trained(self, job_id: JobId, staleness: list[int]) -> None:
        """Records the staleness, in versions, of each trajectory of a step."""
        self._counted.add(job_id)
        histogram = names.STALENESS.on(self.registry).labels(job_id=job_id)
        for versions in staleness:
            histogram.observe(versions)

    def stepped(self, job_id: JobId, parts: dict[str, float]) -> None:
        """Records the durations of one step, in seconds by part: gen, train, update_weights, step."""
        self._counted.add(job_id)
        for part, seconds in parts.items():
            names.STEP_S.on(self.registry).labels(job_id=job_id, part=part).observe(seconds)

    def published(
        self, job_id: JobId, source: str, outcome: str, phases: dict[str, float], sent: int, pauses: list[float]
    ) -> None:
        """Records a publication. `source` is trainer or sibling, `sent` bytes; phases and pauses are in seconds."""
        self._counted.add(job_id)
        names.PUBLICATIONS.on(self.registry).labels(job_id=job_id, source=source, outcome=outcome).inc()
        names.PUBLICATION_BYTES.on(self.registry).labels(job_id=job_id, source=source).inc(sent)
        for phase, seconds in phases.items():
            names.PUBLICATION_S.on(self.registry).labels(job_id=job_id, source=source, phase=phase).observe(seconds)
        for pause_s in pauses:
            names.PAUSE_S.on(self.registry).labels(job_id=job_id).observe(pause_s)

    async def page(self, store: Store, fleet: FleetView) -> bytes:
        """The page, in Prometheus's text format. Jobs that are neither active nor have ended lately are only counted by
        their state, so that the page does not grow with their number. Raises StoreDown."""
        counts = await store.index.counts()
        ids = [job_id for state in ACTIVE for job_id in await store.index.in_state(state, LATELY)]
        ids += await store.index.finished_since(time.time() - LATELY_S, LATELY)
        jobs = await store.index.without_specs(ids)
        ledgers = {job.id: await store.prompts(job.id).view() for job in jobs if job.state in ACTIVE}
        active = [job for job in jobs if job.state in ACTIVE]
        await self._health.set(store, active)
        await self._redis(store)
        self._jobs(counts, jobs)
        self._begin_counting(active)
        self._ledgers(ledgers)
        self._fleet(fleet)
        self._forget({job.id for job in jobs})
        return generate_latest(self.registry)

    def _begin_counting(self, active: Sequence[JobRecord]) -> None:
        """Counters of an active job begin at 0: Prometheus sees no growth in a series that begins at 1."""
        for job in active:
            self._counted.add(job.id)
            for counter in (
                names.LEASES,
                names.LEASES_EXPIRED,
                names.LEASES_FENCED,
                names.GROUPS,
                names.RESPONSE_TOKENS,
            ):
                counter.on(self.registry).labels(job_id=job.id)
            for kind in EventKind:
                names.EVENTS.on(self.registry).labels(job_id=job.id, kind=kind)

    async def _redis(self, store: Store) -> None:
        usage = await store.connection.usage()
        if usage is not None:
            names.REDIS_MEMORY.on(self.registry).set(usage.memory_bytes)
            names.REDIS_CLIENTS.on(self.registry).set(usage.clients)

    def _forget(self, shown: set[JobId]) -> None:
        """Removes the counters and histograms of all jobs but those `shown`."""
        for job_id in self._counted - shown:
            for metric in OF_A_JOB:
                metric.on(self.registry).remove_by_labels({"job_id": job_id})
        self._counted &= shown

    def _jobs(self, counts: Mapping[JobState, int], jobs: Sequence[JobRecord]) -> None:
        states = names.JOBS.on(self.registry)
        states.clear()
        for state, count in counts.items():
            states.labels(state=state).set(count)
        gauges = (names.JOB_STEP, names.JOB_VERSION, names.JOB_REWARD, names.JOB_EVALUATION, names.JOB_EVALUATED)
        for gauge in gauges:
            gauge.on(self.registry).clear()
        for job in jobs:
            shown = job.summary(None)
            held_out, coverage = shown.evaluation_before, shown.evaluation_before_coverage
            if shown.evaluation_step is not None:
                held_out, coverage = shown.evaluation_last, shown.evaluation_last_coverage
            part = None if coverage is None else coverage.scored / coverage.asked
            values = (job.step, job.version, job.reward, held_out, part)
            for gauge, value in zip(gauges, values, strict=True):
                if value is not None:
                    gauge.on(self.registry).labels(job_id=job.id).set(value)

    def _ledgers(self, ledgers: dict[JobId, LedgerView]) -> None:
        prompts, reasons = names.PROMPTS.on(self.registry), names.PROMPTS_DROPPED.on(self.registry)
        prompts.clear()
        reasons.clear()
        for job_id, ledger in ledgers.items():
            for where in LEDGER:
                prompts.labels(job_id=job_id, where=where).set(getattr(ledger, where))
            for reason in DropReason:
                reasons.labels(job_id=job_id, reason=reason).set(ledger.reasons.get(reason, 0))
        names.QUEUE_DEPTH.on(self.registry).set(sum(ledger.queued for ledger in ledgers.values()))

    def _fleet(self, fleet: FleetView) -> None:
        members, speed = names.MEMBERS.on(self.registry), names.MEMBER_TOKENS_PER_S.on(self.registry)
        members.clear()
        speed.clear()
        everybody = (*fleet.trainers, *fleet.replicas)
        for (kind, state), count in Counter((m.kind, m.state) for m in everybody).items():
            members.labels(kind=kind, state=state).set(count)
        for member in everybody:
            speed.labels(member=member.id).set(member.tokens_per_s)
        names.EPOCH.on(self.registry).set(fleet.epoch)
