"""Jobs in Redis: one hash each. index.py lists them."""

import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from millrace.errors import InvalidState
from millrace.events import JobMoved, Payload
from millrace.ids import JobId, Purpose
from millrace.rest import JobState
from services.coordinator.state.job import JobRecord, Wanted, before, no_such_job, refusal
from services.coordinator.store.connection import Connection, text

REQUESTS_KEPT_S = 7 * 24 * 3600
"""How long an idempotency key is remembered."""
ANYTHING: Literal["any"] = "any"
"""Any pending request to a job."""


def key(job_id: str) -> str:
    return f"millrace:job:{job_id}"


class Jobs:
    """All jobs."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def create(self, job: JobRecord, idempotency_key: str = "", digest: str = "") -> tuple[JobId, bool]:
        """Stores a new job, or finds the one that was stored with this key. Answers its id, and whether it is new.
        `digest` names the spec as it was submitted; without one that of the job counts.

        Raises InvalidState if the key was used for a different spec.
        """
        name = _request(idempotency_key) if idempotency_key else ""
        fields = {"id": job.id, "name": job.name, "state": job.state, "spec_json": job.spec_json, "step": 0}
        fields |= {"created_s": job.created_s, "version": 0, "cursor": 0, "lineage": 0, "folder": job.folder}
        fields |= {name: getattr(job, name) for name in ("wanted_partition", "priority", "preempt", "share", "pools")}
        fields |= {} if job.steps is None else {"steps": job.steps}
        fields |= {"tags_json": job.tags_json, "notes": job.notes, "user": job.user}
        event = event_parts(JobMoved(state=job.state), f"{job.name} was submitted")
        digest = digest or job.spec_digest
        arguments = [job.id, job.created_s, digest, REQUESTS_KEPT_S, len(event), *event, *_flat(fields)]
        known, known_digest = await self._redis.run("create_job", [key(job.id), name], arguments)
        if text(known_digest) != digest:
            what = f"the idempotency key {idempotency_key!r} was used for {text(known)}, which has another spec."
            raise InvalidState(what, "use a new key for a new job.")
        return JobId(text(known)), text(known) == job.id

    async def knows(self, idempotency_key: str) -> bool:
        """Whether a job was created with this key."""
        return bool(idempotency_key and await self._redis.do("EXISTS", _request(idempotency_key)))

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound."""
        fields = await self._redis.do("HGETALL", key(job_id))
        if not fields:
            raise no_such_job(job_id)
        return record(fields)

    async def update(self, job_id: JobId, **fields: Any) -> None:
        """Sets fields of the job's record."""
        await self._redis.do("HSET", key(job_id), *_flat(fields))

    async def move(
        self,
        job_id: str,
        state: JobState,
        message: str,
        only: list[JobState] | None = None,
        pending: Wanted | Literal["any"] = ANYTHING,
        **fields: Any,
    ) -> None:
        """Moves the job to `state` along TRANSITIONS, with `fields` and an event that says `message`, all at once.

        At a start the ledger goes back to the job's step: what an earlier end of the job dropped waits to be issued
        again, as soon as `Prompts.undo` has finished. Of the ledger of a job that succeeded only the counts stay.

        Raises NotFound, and InvalidState if there is no such transition, the job is in none of the states `only`,
        another request than `pending` is pending, or a cancellation would be overwritten.
        """
        event = event_parts(JobMoved(state=state), message)
        allowed = before(state) if only is None else only
        await self._change(job_id, allowed, pending, state, event, {"state": state} | fields)

    async def want(
        self,
        job_id: str,
        allowed: list[JobState],
        asked: str,
        pending: Wanted | Literal["any"] = ANYTHING,
        **fields: Any,
    ) -> None:
        """Sets `fields` if the job is in one of the `allowed` states and no other request than `pending` is pending.
        `asked`: what the caller asks for, as it reads in the error: paused, cancelled, ...

        Raises NotFound, InvalidState.
        """
        await self._change(job_id, allowed, pending, asked, [], fields)

    async def _change(
        self,
        job_id: str,
        allowed: list[JobState],
        pending: Wanted | Literal["any"],
        asked: str,
        event: list[str],
        fields: Mapping[str, Any],
    ) -> None:
        arguments = [uuid.uuid4().hex, pending, len(allowed), *allowed, len(event), *event, *_flat(fields)]
        ledger = [f"{key(job_id)}:{Purpose.TRAIN}"] if "state" in fields else []
        answer = await self._redis.run("move_job", [key(job_id), *ledger], arguments)
        if answer is None:
            raise no_such_job(job_id)
        moved, state, wanted = answer[0], JobState(text(answer[1])), Wanted(text(answer[2]))
        if not moved:
            raise refusal(job_id, state, asked, wanted)

    async def wanted(self, job_id: JobId) -> tuple[JobState, Wanted]:
        """The job's state, and the pending request to its loop."""
        state, wanted = await self._redis.do("HMGET", key(job_id), "state", "wanted")
        return JobState(text(state)), Wanted(text(wanted))

    async def next_attempt(self, job_id: JobId) -> int:
        """A number for a publication, unique within the job."""
        return int(await self._redis.do("HINCRBY", key(job_id), "attempts", 1))


def event_parts(data: Payload, message: str) -> list[str]:
    """An event as its entry in the log: field, value, field, value, … Raises TypeError for an undeclared payload."""
    if not isinstance(data, Payload):
        raise TypeError(f"{type(data).__name__} is not declared in millrace/events")
    payload = data.model_dump_json(exclude={"kind"})
    return _flat({"time_s": str(time.time()), "kind": data.kind, "message": message, "data": payload})


def _request(idempotency_key: str) -> str:
    return f"millrace:idempotency:{idempotency_key}"


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for field in fields.items() for part in field]


def record(fields: Mapping[bytes, bytes | None]) -> JobRecord:
    """The job whose hash has these fields."""
    return JobRecord.of({name.decode(): text(value) for name, value in fields.items()})
