"""The event log of each job: kept in the store, followed over REST."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from millrace.events import Event, EventKind, Payload
from millrace.ids import JobId
from millrace.rest import JobState
from services.coordinator.state.bell import Bell, waited
from services.coordinator.store import Store

log = structlog.get_logger(__name__)


class Events:
    def __init__(self, store: Store, on_event: Callable[[JobId, EventKind], None] = lambda *_: None) -> None:
        """`on_event` is called with the kind of each event that is added."""
        self._store = store
        self._on_event = on_event
        self._closed = False
        self._bells: defaultdict[JobId, Bell] = defaultdict(Bell)

    async def add(self, job_id: JobId, data: Payload, message: str) -> None:
        """Adds an event: `data` is its kind and payload, `message` is for people."""
        log.info(message, kind=data.kind, job=job_id)
        await self._store.records(job_id).add_event(data, message)
        self._on_event(job_id, data.kind)
        self._bells[job_id].ring()

    async def move(
        self, job_id: JobId, state: JobState, message: str, only: list[JobState] | None = None, **fields: Any
    ) -> None:
        """Moves a job to another state and adds the event of it. Raises NotFound, InvalidState."""
        await self._store.jobs.move(job_id, state, message, only, **fields)
        log.info(message, kind=EventKind.JOB_STATE, job=job_id, state=state)
        self._on_event(job_id, EventKind.JOB_STATE)
        self._bells[job_id].ring()

    async def follow(self, job_id: JobId, after: str, silence_s: float) -> AsyncIterator[list[Event]]:
        """Yields the events after the id `after`, several at a time, until `close`; an empty list whenever there was
        none for `silence_s` seconds."""
        records = self._store.records(job_id)
        while not self._closed:
            ring = self._bells[job_id].next()
            while found := await records.events(after):
                after = found[-1].id
                yield found
            if not await waited(ring, silence_s):
                yield []

    def close(self) -> None:
        """Ends every `follow`."""
        self._closed = True
        for bell in self._bells.values():
            bell.ring()
