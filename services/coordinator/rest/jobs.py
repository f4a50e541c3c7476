"""/v1/jobs: submit, look, steer, follow."""

import json
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from millrace.errors import NotFound
from millrace.events import Event, JobMoved
from millrace.rest import JobView, LedgerView, SampleView, StepMetrics
from services.coordinator.jobs.control import Control
from services.coordinator.observe.events import Events
from services.coordinator.rest import bodies
from services.coordinator.rest.schema import SPEC_BODY, Responses, error_responses
from services.coordinator.state.job import ENDED
from services.coordinator.store import Store

SILENCE_S = 15.0
"""A stream without events carries a comment so often, so that both sides know that it lives."""


ERRORS = error_responses(
    {404: "No such job.", 409: "The job's state does not allow it.", 503: "Redis does not answer."}
)
BODY_ERRORS = error_responses(
    {
        413: "The body is too large for a job spec.",
        415: "The body is neither JSON nor YAML.",
        422: "The body has mistakes.",
    }
)
EVENTS: Responses = {200: {"model": Event, "description": "The `data` of each server-sent event is this document."}}


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"


async def _id(job_id: Annotated[str, Path()]) -> str:
    """Anything else than an id is no part of a key in the store."""
    if not re.fullmatch(r"job-[0-9a-f]{12}", job_id):
        raise NotFound(f"there is no job {job_id}.", "GET /v1/jobs lists those there are.")
    return job_id


Id = Annotated[str, Depends(_id)]


def routes(store: Store, control: Control, events: Events) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)

    @router.post("", status_code=201, openapi_extra=SPEC_BODY, responses=BODY_ERRORS)
    async def submit(
        request: Request,
        response: Response,
        idempotency_key: Annotated[str, Header(max_length=200)] = "",
    ) -> JobView:
        """Submits a job: a job spec as JSON or YAML. Everything that can be checked beforehand is; a spec that cannot
        work is refused with every mistake and its fix. Twice with the same `Idempotency-Key` is once: the second
        call answers the first one's job with status 200."""
        job, new = await control.submit(await bodies.tree(request), idempotency_key)
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return job.view()

    @router.get("")
    async def list_jobs() -> list[JobView]:
        """All jobs, the newest first."""
        return [job.view() for job in reversed(await store.jobs.all())]

    @router.get("/{job_id}")
    async def show(job_id: Id) -> JobView:
        """One job."""
        return (await store.jobs.get(job_id)).view()

    @router.delete("/{job_id}")
    async def cancel(job_id: Id) -> JobView:
        """Ends the job after what it is doing now. What was trained stays; what is in flight is dropped."""
        return (await control.cancel(job_id)).view()

    @router.post("/{job_id}/pause")
    async def pause(job_id: Id) -> JobView:
        """Stops between two steps: nothing new is issued or trained, nothing is lost."""
        return (await control.pause(job_id)).view()

    @router.post("/{job_id}/resume", responses=BODY_ERRORS)
    async def resume(job_id: Id, request: Request) -> JobView:
        """Lets a paused job go on where it stopped. One that failed or was cancelled is queued again: it goes on from
        the version that the trainer still holds, from its last checkpoint, or from the model. The body may hold fields
        of its spec that are to be other from here on."""
        return (await control.resume(job_id, await bodies.fields(request))).view()

    _looking(router, store)
    _following(router, store, events)
    return router


def _looking(router: APIRouter, store: Store) -> None:
    @router.get("/{job_id}/metrics")
    async def metrics(
        job_id: Id, after: Annotated[int, Query(ge=-1, description="Rows of later steps only.")] = -1
    ) -> list[StepMetrics]:
        """The job's step metrics under verl's names, one row a step; step 0 has the evaluation before training."""
        job = await store.jobs.get(job_id)
        return await store.records(job.id).rows(after, job.step)

    @router.get("/{job_id}/samples")
    async def samples(
        job_id: Id,
        step: Annotated[int | None, Query(ge=0, description="Of this step only.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    ) -> list[SampleView]:
        """Prompts with their answers, rewards and weight versions, the newest first."""
        job = await store.jobs.get(job_id)
        return await store.records(job.id).samples(limit, step)

    @router.get("/{job_id}/ledger")
    async def ledger(job_id: Id) -> LedgerView:
        """Where every prompt of the job stands."""
        job = await store.jobs.get(job_id)
        return await store.prompts(job.id).view()


def _following(router: APIRouter, store: Store, events: Events) -> None:
    @router.get("/{job_id}/events", response_class=EventStream, responses=EVENTS)
    async def follow(
        job_id: Id,
        last_event_id: Annotated[str, Header(pattern=r"^$|^\d{1,19}-\d{1,19}$")] = "",
        follow: Annotated[
            bool, Query(description="Wait for what comes; otherwise the stream ends at the last.")
        ] = True,
    ) -> EventStream:
        """The job's event log as server-sent events, from the beginning or after `Last-Event-ID`. Each event's data is
        an Event document. The stream ends when the job has ended and everything was told."""
        job = await store.jobs.get(job_id)

        async def has_ended() -> bool:
            return (await store.jobs.get(job.id)).state in ENDED

        async def stream() -> AsyncIterator[bytes]:
            told_only = not follow or await has_ended()
            async for found in events.follow(job.id, last_event_id, 0.0 if told_only else SILENCE_S):
                for event in found:
                    yield frame(event)
                if not found:
                    yield b": nothing new\n\n"
                if (told_only and not found) or (_tells_an_end(found) and await has_ended()):
                    return

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return EventStream(stream(), headers=headers)


def _tells_an_end(found: list[Event]) -> bool:
    """A job's last event is its last transition; one that was continued since has more."""
    last = found[-1].data if found else None
    return isinstance(last, JobMoved) and last.state in ENDED


def frame(event: Event) -> bytes:
    """In ASCII: many readers take U+2028 and its like for the end of a line."""
    data = json.dumps(json.loads(event.model_dump_json()))
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
