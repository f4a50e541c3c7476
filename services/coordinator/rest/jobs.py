"""/v1/jobs: submitting, reading, controlling and following jobs, and tests of webhooks."""

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from millrace.admission.advice import advice
from millrace.errors import InvalidJob
from millrace.events import Event, JobMoved
from millrace.rest import DeletedView, JobPage, JobState, JobView, LedgerView, SampleView, StepMetrics
from millrace.rest.users import Role
from millrace.rest.webhooks import WebhookResult
from millrace.spec.job import Notes
from millrace.validation.mistakes import explain
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.placing import JobViews
from services.coordinator.observe import groups
from services.coordinator.observe.events import Events
from services.coordinator.rest import bodies, schema
from services.coordinator.rest.bodies import LARGEST_STEP, Id
from services.coordinator.rest.reading import add_samples, add_series, add_spec
from services.coordinator.rest.users import Caller
from services.coordinator.state.job import ENDED
from services.coordinator.store import Store
from services.coordinator.store.records import EVENTS_KEPT
from services.coordinator.webhooks import Webhooks

CURSOR = r"^$|^\d{1,15}(\.\d{1,20})?$"
"""A cursor of the list of jobs: the Unix time of a submission."""
SILENCE_S = 15.0
"""Seconds after which a stream without events carries a comment, so that both sides know that it works."""


ERRORS = schema.error_responses({404: "No such job.", 409: "The job's state does not allow it."})
SUBMITTED: schema.Responses = {
    200: {"model": JobView, "description": "The job of an earlier call with this `Idempotency-Key`."},
    **schema.BODY_ERRORS,
}
EVENTS: schema.Responses = {
    200: {"model": Event, "description": "The `data` of each server-sent event is this document."}
}


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"


def routes(guards: schema.Guards, store: Store, control: Control, views: JobViews, events: Events) -> APIRouter:
    router = schema.subject("/v1/jobs", "jobs", guards, ERRORS)

    @router.post("", status_code=201, openapi_extra=schema.SPEC_BODY, responses=SUBMITTED)
    async def submit(
        request: Request,
        response: Response,
        idempotency_key: Annotated[str, Header(max_length=200)] = "",
    ) -> JobView:
        """Submits a job: a job spec as JSON or YAML. The spec and the files that it names are checked; a spec that
        cannot run is refused with every mistake and its fix. A second call with the same `Idempotency-Key` submits
        nothing: it answers the job of the first call, with status 200."""
        job, new = await control.submit(await bodies.tree(request), idempotency_key, request.state.caller.user)
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return views.of(job).model_copy(update={"advice": advice(job.spec)})

    @router.get("")
    async def list_jobs(
        request: Request,
        state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
        tag: Annotated[str | None, Query(max_length=50, description="Only jobs with this tag.")] = None,
        limit: Annotated[int, Query(ge=1, le=500, description="Most jobs on this page.")] = 50,
        cursor: Annotated[str, Query(pattern=CURSOR, description="`next` of the page before.")] = "",
    ) -> JobPage:
        """One page of the list of the caller's jobs, the newest first, without their specs; an admin's has all jobs."""
        caller: Caller = request.state.caller
        if tag is None and caller.role is Role.ADMIN:
            page = await store.index.page(limit, state, cursor)
        else:
            page = await store.index.chosen(lambda job: caller.sees(job.user) and job.has(tag), limit, state, cursor)
        return JobPage(jobs=[views.summary(job) for job in page.jobs], next=page.next, total=page.total)

    @router.get("/{job_id}")
    async def show(job_id: Id) -> JobView:
        """One job."""
        return views.of(await store.jobs.get(job_id))

    @router.patch("/{job_id}", openapi_extra=schema.NOTES_BODY, responses=schema.BODY_ERRORS)
    async def note(job_id: Id, request: Request) -> JobView:
        """Replaces tags and notes of a job in any state. A field that is not given stays."""
        tree = await bodies.fields(request)
        try:
            given = Notes.model_validate(tree)
        except ValidationError as error:
            raise InvalidJob.of(explain(error.errors(), Notes)) from error
        return views.of(await control.note(job_id, given.tags, given.notes))

    _add_control(router, control, views)
    _add_reading(router, store)
    add_series(router, store)
    add_samples(router, store)
    add_spec(router, store)
    _add_following(router, store, events)
    return router


def _add_control(router: APIRouter, control: Control, views: JobViews) -> None:
    @router.delete("/{job_id}")
    async def cancel(job_id: Id) -> JobView:
        """Cancels the job; the step in progress is finished. Trained steps are kept; prompts in flight are dropped."""
        return views.of(await control.cancel(job_id))

    @router.post("/{job_id}/delete")
    async def delete(
        job_id: Id,
        checkpoints: Annotated[
            bool, Query(description="Delete its checkpoints too, as far as they are known.")
        ] = False,
    ) -> DeletedView:
        """Deletes a job that has ended: its events, metrics, samples and ledger. Its output folder stays."""
        return await control.deletion.delete(job_id, checkpoints=checkpoints)

    @router.post("/{job_id}/pause")
    async def pause(job_id: Id) -> JobView:
        """Pauses the job after the step in progress: nothing new is issued or trained, nothing is lost."""
        return views.of(await control.pause(job_id))

    @router.post("/{job_id}/resume", openapi_extra=schema.CHANGES_BODY, responses=schema.BODY_ERRORS)
    async def resume(job_id: Id, request: Request) -> JobView:
        """Continues a paused job where it stopped. A job that failed or was cancelled is queued again: it continues
        from the version that the trainer still holds, from its last checkpoint, or from the model. For such a job the
        body may hold fields of its spec, nested as there, with new values."""
        return views.of(await control.resume(job_id, await bodies.fields(request)))


def _add_reading(router: APIRouter, store: Store) -> None:
    @router.get("/{job_id}/metrics")
    async def metrics(
        job_id: Id,
        after: Annotated[int, Query(ge=-1, le=LARGEST_STEP, description="Only rows of steps after this one.")] = -1,
    ) -> list[StepMetrics]:
        """The job's step metrics under verl's names, one row a step; step 0 has the evaluation before training."""
        job = await store.jobs.get(job_id)
        return await store.records(job.id).rows(after, job.step)

    @router.get("/{job_id}/samples")
    async def samples(
        job_id: Id,
        step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="Only samples of this step.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    ) -> list[SampleView]:
        """Prompts with their answers, rewards and weight versions, newest first."""
        job = await store.jobs.get(job_id)
        if step is None:
            return await store.records(job.id).samples(limit)
        found = await groups.page(store.records(job.id), groups.Wanted(step=step), limit, None)
        return [sample for group in found.groups for sample in reversed(group.samples)][:limit]

    @router.get("/{job_id}/ledger")
    async def ledger(job_id: Id) -> LedgerView:
        """How many prompts of the job are in which state."""
        job = await store.jobs.get(job_id)
        return await store.prompts(job.id).view()


def _add_following(router: APIRouter, store: Store, events: Events) -> None:
    @router.get("/{job_id}/events", response_class=EventStream, responses=EVENTS)
    async def follow(
        job_id: Id,
        last_event_id: Annotated[str, Header(pattern=r"^$|^\d{1,19}-\d{1,19}$")] = "",
        follow: Annotated[
            bool, Query(description="Wait for new events; otherwise the stream ends with the last one.")
        ] = True,
        newest: Annotated[
            int | None, Query(ge=1, le=EVENTS_KEPT, description="Begin with so many events before the end.")
        ] = None,
    ) -> EventStream:
        """The job's event log as server-sent events, from the beginning, after `Last-Event-ID`, or of the `newest` ones
        only. The stream ends when the job has ended and every event was sent."""
        job = await store.jobs.get(job_id)
        after = last_event_id
        if newest is not None and not after:
            after = await store.records(job.id).event_before(newest)

        async def has_ended() -> bool:
            found = await store.index.without_specs([job.id])
            return not found or found[0].state in ENDED  # one that ended long ago may be deleted

        async def stream() -> AsyncIterator[bytes]:
            only_past = not follow or await has_ended()
            async for found in events.follow(job.id, after, 0.0 if only_past else SILENCE_S):
                for event in found:
                    yield frame(event)
                if not found:
                    yield b": nothing new\n\n"
                if (only_past and not found) or (_is_end(found) and await has_ended()):
                    return

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return EventStream(stream(), headers=headers)


def _is_end(found: list[Event]) -> bool:
    """Whether the last of these events is the end of the job. A job that was resumed since then has later events."""
    last = found[-1].data if found else None
    return isinstance(last, JobMoved) and last.state in ENDED


def frame(event: Event) -> bytes:
    """One server-sent event. It is pure ASCII: many readers take U+2028 and similar characters for a line end."""
    data = json.dumps(json.loads(event.model_dump_json()))
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()


def webhook_routes(guards: schema.Guards, store: Store, webhooks: Webhooks) -> APIRouter:
    router = schema.subject("/v1", "webhooks", guards)

    @router.post("/webhooks/test", responses=schema.error_responses({409: "The coordinator has no webhook."}))
    async def test_own() -> list[WebhookResult]:
        """Sends a test message to the webhook of the coordinator, once."""
        return await webhooks.test(None)

    @router.post(
        "/jobs/{job_id}/webhooks/test",
        responses=schema.error_responses({404: "No such job.", 409: "It has no webhooks."}),
    )
    async def test_of_job(job_id: Id) -> list[WebhookResult]:
        """Sends a test message to each webhook of the job, once."""
        return await webhooks.test(await store.jobs.get(job_id))

    return router
