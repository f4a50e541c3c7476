"""Jobs in Redis: one hash each, in the order of their submission."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from millrace.errors import InvalidState
from millrace.events import JobMoved, Payload
from millrace.ids import JobId
from millrace.rest import JobState
from services.coordinator.state.job import JobRecord, before, no_such_job, refusal
from services.coordinator.store.connection import Connection, text

ALL = "millrace:jobs"
REQUESTS_KEPT_S = 7 * 24 * 3600
"""How long an idempotency key stands for its job."""
ANYTHING = "any"
"""Whatever is wanted of a job."""


def key(job_id: str) -> str:
    return f"millrace:job:{job_id}"


class Jobs:
    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def create(self, job: JobRecord, idempotency_key: str = "") -> tuple[JobId, bool]:
        """The job that `idempotency_key` stands for, and whether it is new.

        Raises InvalidState where the key was used for a different spec.
        """
        name = _request(idempotency_key) if idempotency_key else ""
        fields = {"id": job.id, "name": job.name, "state": job.state, "spec_json": job.spec_json, "step": 0}
        fields |= {"created_s": job.created_s, "version": 0, "cursor": 0, "lineage": 0}
        event = event_parts(JobMoved(state=job.state), f"{job.name} was submitted")
        arguments = [job.id, job.created_s, job.spec_digest, REQUESTS_KEPT_S, len(event), *event, *_flat(fields)]
        known, known_digest = await self._redis.run("create_job", [key(job.id), ALL, name], arguments)
        if text(known_digest) != job.spec_digest:
            what = f"the idempotency key {idempotency_key!r} was used for {text(known)}, which has another spec."
            raise InvalidState(what, "take a new key for a new job.")
        return JobId(text(known)), text(known) == job.id

    async def knows(self, idempotency_key: str) -> bool:
        """Whether the key stands for a job."""
        return bool(idempotency_key and await self._redis.do("EXISTS", _request(idempotency_key)))

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound."""
        fields = await self._redis.do("HGETALL", key(job_id))
        if not fields:
            raise no_such_job(job_id)
        return _record(fields)

    async def all(self) -> list[JobRecord]:
        """The oldest first."""
        ids = await self._redis.do("ZRANGE", ALL, 0, -1)
        if not ids:
            return []
        return [_record(f) for f in await self._redis.together(*(("HGETALL", key(text(i))) for i in ids)) if f]

    async def update(self, job_id: JobId, **fields: Any) -> None:
        await self._redis.do("HSET", key(job_id), *_flat(fields))

    async def move(
        self,
        job_id: str,
        state: JobState,
        message: str,
        only: list[JobState] | None = None,
        pending: str = ANYTHING,
        **fields: Any,
    ) -> None:
        """Moves the job to `state` along TRANSITIONS, with `fields` and an event that says `message`, all in one go.
        With a start its ledger goes back to its step: what an earlier end of the job dropped waits to be issued again,
        once `Prompts.undo` is through. Of the ledger of a job that succeeded only the counts stay.

        Raises NotFound, and InvalidState where there is no such transition, it is in none of the states `only`,
        something else than `pending` is wanted of it, or a cancellation would be overwritten.
        """
        event = event_parts(JobMoved(state=state), message)
        allowed = before(state) if only is None else only
        await self._change(job_id, allowed, pending, state, event, {"state": state} | fields)

    async def want(
        self, job_id: str, allowed: list[JobState], asked: str, pending: str = ANYTHING, **fields: Any
    ) -> None:
        """Sets `fields` if the job is in one of the `allowed` states, and nothing else than `pending` is wanted of it.

        Raises NotFound, InvalidState.
        """
        await self._change(job_id, allowed, pending, asked, [], fields)

    async def _change(
        self,
        job_id: str,
        allowed: list[JobState],
        pending: str,
        asked: str,
        event: list[str],
        fields: Mapping[str, Any],
    ) -> None:
        arguments = [uuid.uuid4().hex, pending, len(allowed), *allowed, len(event), *event, *_flat(fields)]
        ledger = [f"{key(job_id)}:train"] if "state" in fields else []
        answer = await self._redis.run("move_job", [key(job_id), *ledger], arguments)
        if answer is None:
            raise no_such_job(job_id)
        moved, state, wanted = answer[0], JobState(text(answer[1])), text(answer[2])
        if not moved:
            raise refusal(job_id, state, asked, wanted)

    async def wanted(self, job_id: JobId) -> tuple[JobState, str]:
        """The job's state, and what somebody asked of its loop: `pause`, `cancel` or nothing."""
        state, wanted = await self._redis.do("HMGET", key(job_id), "state", "wanted")
        return JobState(text(state)), text(wanted)

    async def next_attempt(self, job_id: JobId) -> int:
        """A number for a publication, never given before in this job."""
        return int(await self._redis.do("HINCRBY", key(job_id), "attempts", 1))


def event_parts(data: Payload, message: str) -> list[str]:
    """An event as its entry in the log: field, value, field, value, … Raises TypeError for an undeclared payload."""
    if not isinstance(data, Payload):
        raise TypeError(f"{type(data).__name__} is not declared in millrace/events.py")
    payload = data.model_dump_json(exclude={"kind"})
    return _flat({"time_s": str(time.time()), "kind": data.kind, "message": message, "data": payload})


def _request(idempotency_key: str) -> str:
    return f"millrace:idempotency:{idempotency_key}"


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for field in fields.items() for part in field]


def _record(fields: Mapping[bytes, bytes]) -> JobRecord:
    return JobRecord.of({name.decode(): value.decode() for name, value in fields.items()})
