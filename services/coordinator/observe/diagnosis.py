"""The diagnosis of a job: its spans and rows are read, and judged by services/coordinator/diagnosis."""

import asyncio
from collections.abc import Sequence

from millrace.rest import StepMetrics
from millrace.rest.diagnosis import DiagnosisView
from millrace.telemetry.spans.batches import Batch
from services.coordinator.diagnosis import summary
from services.coordinator.diagnosis.findings import diagnose
from services.coordinator.observe.span_store import SpanStore
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from services.coordinator.timeline.activity import Activity
from services.coordinator.timeline.lanes import lanes_of, window

STEPS = 10
"""Steps that are judged unless somebody asks for others."""


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
