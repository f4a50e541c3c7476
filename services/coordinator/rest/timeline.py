"""/v1/jobs/{job_id}/timeline and /diagnosis: what every service did in some steps of a job, and what slows it down."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from millrace.rest import StepMetrics
from millrace.rest.diagnosis import DiagnosisView
from millrace.rest.timeline import TimelineView
from millrace.telemetry.spans.batches import Batch
from services.coordinator.diagnosis import summary
from services.coordinator.diagnosis.findings import diagnose
from services.coordinator.observe.span_store import KEPT_STEPS, SpanStore
from services.coordinator.rest.bodies import LARGEST_STEP, Id
from services.coordinator.rest.jobs import ERRORS
from services.coordinator.rest.schema import Guards, subject
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from services.coordinator.timeline.idle import Activity
from services.coordinator.timeline.lanes import lanes_of, window

Step = Annotated[
    int | None, Query(ge=0, le=LARGEST_STEP, description="A step, 0 for the start of the job. Default: the last one.")
]
STEPS = 10
"""Steps that are judged unless somebody asks for others."""


def routes(guards: Guards, store: Store, spans: SpanStore) -> APIRouter:
    router = subject("/v1/jobs", "jobs", guards, ERRORS)

    @router.get("/{job_id}/timeline", description=ABOUT)
    async def timeline(job_id: Id, from_step: Step = None, to_step: Step = None) -> TimelineView:
        return await spans.timeline(await store.jobs.get(job_id), from_step, to_step)

    @router.get("/{job_id}/diagnosis")
    async def diagnose(job_id: Id, from_step: Step = None, to_step: Step = None) -> DiagnosisView:
        """What slows the job down, with the figures that say so and what to change: in the steps from `from_step` to
        `to_step`, by default the last ten. It is computed from spans, and from step metrics if none are kept."""
        return await diagnosis(store, spans, await store.jobs.get(job_id), from_step, to_step)

    return router


ABOUT = f"""What coordinator, trainer and replicas did from `from_step` to `to_step`, as lanes of spans, and why trainer
and replicas were idle. The last {KEPT_STEPS} steps are kept, for a day. `to_step` may be the step in progress."""


async def diagnosis(
    store: Store, spans: SpanStore, job: JobRecord, from_step: int | None, to_step: int | None
) -> DiagnosisView:
    """What slows the job down in the steps from `from_step` to `to_step`; None: in its last STEPS steps."""
    last = min(job.step if to_step is None else to_step, job.step)
    first = min(last, max(1, last - STEPS + 1 if from_step is None else from_step))
    first, last, batches = await spans.batches(job, first, last)
    rows = await store.records(job.id).rows(first - 1, last)
    return await asyncio.to_thread(_judged, job, first, last, batches, rows)


def _judged(
    job: JobRecord, first: int, last: int, batches: Sequence[Batch], rows: Sequence[StepMetrics]
) -> DiagnosisView:
    lanes = lanes_of(job.id, batches)
    if lanes and last > 0:
        start_s, end_s = window(lanes, first, last, rows[-1].time_s if rows else 0.0)
        activity = Activity.of(lanes, start_s, end_s, last - first + 1)
        found = summary.of_spans(activity, first, last, job.spec, rows, job.token_budget)
    else:
        found = summary.of_metrics(job.spec, rows, job.token_budget)
    return diagnose(job.id, first, last, found, job.spec)
