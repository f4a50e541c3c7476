"""/v1/jobs/{job_id}/timeline: what every service did during some steps of a job."""

from typing import Annotated

from fastapi import APIRouter, Query

from millrace.timeline.view import TimelineView
from services.coordinator.observe.span_store import KEPT_STEPS, SpanStore
from services.coordinator.rest.jobs import ERRORS
from services.coordinator.rest.parameters import LARGEST_STEP, Id
from services.coordinator.store import Store

Step = Annotated[
    int | None, Query(ge=0, le=LARGEST_STEP, description="A step, 0 for the start of the job. Default: the last one.")
]


def routes(store: Store, spans: SpanStore) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)

    @router.get("/{job_id}/timeline", description=ABOUT)
    async def timeline(job_id: Id, from_step: Step = None, to_step: Step = None) -> TimelineView:
        return await spans.timeline(await store.jobs.get(job_id), from_step, to_step)

    return router


ABOUT = f"""What coordinator, trainer and replicas did from `from_step` to `to_step`, as lanes of spans, and why trainer
and replicas were idle. The last {KEPT_STEPS} steps are kept, for a day. `to_step` may be the step in progress."""
