"""Keeps the spans of all services for the timeline: the last steps of each job, in Redis, within a bound.

A batch is kept as it came, at the step that was in progress when it came. Batches that do not fit are dropped and
counted: neither members nor the job's loop wait for this.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import structlog

from millrace.ids import JobId, MemberId
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.rest.timeline import TimelineView
from millrace.telemetry.spans.batches import MOST_AT_ONCE, Batch, decode, encode
from millrace.telemetry.spans.kinds import LaneKind
from millrace.telemetry.spans.recorder import RECORDER, Recorder, Span
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from services.coordinator.timeline.lanes import timeline

log = structlog.get_logger(__name__)
COORDINATOR = MemberId("coordinator")
EVERY_S = 0.5
KEPT_STEPS = 50
"""Steps of a job whose spans are kept."""
STEP_BYTES = 512 << 10
"""Most bytes of spans of one step: some 25,000 spans. So a job's spans take at most 25 MiB of Redis's memory."""
MOST_WAITING = 1000
"""Batches of the members of a partition that wait to be stored."""
LARGEST_BATCH = 256 << 10
"""Largest batch of a member, compressed."""
LATE_S = 10.0
"""Spans come at most so late: they wait for their member's next heartbeat, and then to be stored."""
Place = tuple[JobId, int]
"""A job, and the step that is in progress."""


class SpanStore:
    """Takes the batches of members and this process's own spans, stores them every EVERY_S seconds, and reads them."""

    def __init__(
        self,
        store: Store,
        prometheus: PrometheusMetrics,
        running: Callable[[str], Place | None],
        recorder: Recorder = RECORDER,
    ) -> None:
        """`running`: the job that runs in a partition and the step in progress; None while none runs."""
        self._store = store
        self._prometheus = prometheus
        self._running = running
        self._recorder = recorder
        self._places: dict[str, Place] = {}
        """The job of the last spans, by partition: a job's last spans come after its end."""
        self._waiting: dict[str, deque[tuple[bytes, int]]] = {}
        """Batches that wait to be stored, with their numbers of spans, by partition."""
        self._bytes: Counter[Place] = Counter()

    def received(self, partition: str, batch: bytes, count: int) -> None:
        """Takes a batch of `count` spans of a member of the partition."""
        if not batch:
            return
        waiting = self._waiting.setdefault(partition, deque())
        if len(batch) > LARGEST_BATCH or len(waiting) >= MOST_WAITING:
            self._prometheus.dropped_spans(count)
        else:
            waiting.append((batch, count))

    async def run(self) -> None:
        """Stores what comes, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            async with self._store.connection.outlasted():
                await self.flush()

    async def flush(self) -> None:
        """Stores what waits. Raises StoreDown; what was being stored is lost then."""
        by_place: dict[Place, list[tuple[bytes, int]]] = {}
        for partition in {DEFAULT_PARTITION, *self._waiting, *self._places}:
            if (at := self._running(partition) or self._places.get(partition)) is not None:
                self._places[partition] = at
                if waiting := self._waiting.pop(partition, None):
                    by_place[at] = list(waiting)
        spans, dropped = self._recorder.take(MOST_AT_ONCE)
        by_job: dict[str, list[Span]] = {}
        for span in spans:
            by_job.setdefault(span.context.job_id, []).append(span)
        for job, own in by_job.items():
            # Steps may have ended since the job was last seen running: no span is kept under a step before its own.
            known = next((step for running, step in self._places.values() if running == job), 0)
            place = JobId(job), max(known, *(span.context.step for span in own))
            batch = Batch(COORDINATOR, LaneKind.COORDINATOR, own)
            by_place.setdefault(place, []).append((encode(batch), len(own)))
        if dropped:
            self._prometheus.dropped_spans(dropped)
        for place, batches in by_place.items():
            if fitting := self._fitting(place, batches):
                await self._store.records(place[0]).add_spans(place[1], fitting, KEPT_STEPS)

    def _fitting(self, place: Place, batches: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """The batches for which the step still has room."""
        kept: list[bytes] = []
        for batch, count in batches:
            if self._bytes[place] + len(batch) > STEP_BYTES:
                self._prometheus.dropped_spans(count)
                continue
            self._bytes[place] += len(batch)
            kept.append(batch)
        if len(self._bytes) > 2 * KEPT_STEPS * max(1, len(self._places)):
            self._bytes = Counter({each: self._bytes[each] for each in {place, *self._places.values()}})
        return kept

    async def timeline(self, job: JobRecord, from_step: int | None, to_step: int | None) -> TimelineView:
        """What all services did from `from_step` to `to_step`, at most KEPT_STEPS. None: the last trained step."""
        last = min(job.step if to_step is None else to_step, job.step + 1)
        first, last, batches = await self.batches(job, last if from_step is None else from_step, last)
        kept_from = max(0, job.step + 2 - KEPT_STEPS)
        return await asyncio.to_thread(timeline, job.id, batches, first, last, kept_from)

    async def batches(self, job: JobRecord, first: int, last: int) -> tuple[int, int, list[Batch]]:
        """The spans of the steps `first` to `last`, of at most the last KEPT_STEPS of these; the first and the last of
        them."""
        first = max(0, last - KEPT_STEPS + 1, min(first, last))
        found = await self._store.records(job.id).spans(first, await self._last_place(job, last))
        return first, last, await asyncio.to_thread(_decoded, found)

    async def _last_place(self, job: JobRecord, step: int) -> int:
        """The last step at which spans of `step` are kept: a lease may end as many steps later as it may be stale, and
        short steps end before the spans of an earlier one have come."""
        rows = await self._store.records(job.id).rows(step - 1, step + KEPT_STEPS)
        in_time = [row.step for row in rows if row.time_s <= rows[0].time_s + LATE_S]
        return max([step + job.spec.schedule.max_staleness, *in_time]) + 2


def _decoded(found: Sequence[bytes]) -> list[Batch]:
    return [batch for data in found if (batch := decode(data)) is not None]
