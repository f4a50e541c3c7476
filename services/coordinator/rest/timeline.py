"""/v1/jobs/{job_id}/timeline and /diagnosis: what every service did in some steps of a job, and what slows it down."""

from typing import Annotated

from fastapi import APIRouter, Query

from millrace.rest.diagnosis import DiagnosisView
from millrace.rest.timeline import TimelineView
from services.coordinator.observe.diagnosis import diagnosis
from services.coordinator.observe.span_store import KEPT_STEPS, SpanStore
from services.coordinator.rest.bodies import LARGEST_STEP, Id
from services.coordinator.rest.jobs import ERRORS
from services.coordinator.store import Store

Step = Annotated[
    int | None, Query(ge=0, le=LARGEST_STEP, description="A step, 0 for the start of the job. Default: the last one.")
]


def routes(store: Store, spans: SpanStore) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)

    @router.get("/{job_id}/timeline", description=ABOUT)
    async def timeline(job_id: Id, from_step: Step = None, to_step: Step = None) -> TimelineView:
        return await spans.timeline(await store.jobs.get(job_id), from_step, to_step)

    @router.get("/{job_id}/diagnosis")
    async def diagnose(job_id: Id, from_step: Step = None, to_step: Step = None) -> DiagnosisView:
        """What slows the job down, with the figures that say so and what to change: in the steps from `from_step` to
        `to_step`, by default the last ten. It is computed from spans, and from step metrics where none are kept."""
        return await diagnosis(store, spans, await store.jobs.get(job_id), from_step, to_step)

    return router


ABOUT = f"""What coordinator, trainer and replicas did from `from_step` to `to_step`, as lanes of spans, and why trainer
and replicas were idle. The last {KEPT_STEPS} steps are kept, for a day. `to_step` may be the step in progress."""
