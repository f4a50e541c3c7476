"""What jobs wait for, as their views show it and the event log of the job whose turn it is."""

import asyncio
from dataclasses import replace

from millrace import events
from millrace.errors import NotFound
from millrace.rest import JobState, JobSummary, JobView, WaitingFor, WaitingView
from millrace.spec.pool import ROLLOUT
from services.coordinator.jobs.placing import Placing
from services.coordinator.stages.run import Components
from services.coordinator.state.bell import waited
from services.coordinator.state.job import JobRecord
from services.coordinator.state.waiting import waits_for, waits_for_turn
from services.coordinator.store import StoreDown

LOOK_EVERY_S = 1.0
GATHER_S = 0.2
"""Changes of the fleet within this time are looked at together."""
SHOWN_AFTER_S = 2.0
"""An event is added only for what has lasted so long."""


class JobViews:
    """Jobs as people look at them."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    def of(self, job: JobRecord) -> JobView:
        return job.view(self.waits_for(job))

    def summary(self, job: JobRecord) -> JobSummary:
        """The job in a list; `job` was read without its spec."""
        turn = self._placing.of(job).turn.job
        whole = replace(job, spec_json=turn.spec_json) if turn is not None and turn.id == job.id else job
        return job.summary(self.waits_for(whole))

    def is_first(self, turn: JobRecord, components: Components) -> bool:
        """Whether this is the first partition where it is the job's turn: a queued one may be next in several."""
        turns = ((each, each.turn.job) for each in self._placing.partitions.values())
        return next((each for each, job in turns if job is not None and job.id == turn.id), None) is components

    def waits_for(self, job: JobRecord) -> WaitingView | None:
        if job.state is JobState.QUEUED:
            return waits_for_turn(job, self._placing.places(), self._placing.quota)
        components = self._placing.of(job)
        fleet, turn = components.fleet, components.turn.job
        declared = [pool.name for pool in turn.spec.pools] if turn is not None and turn.spec_json else []
        pools = {name: fleet.pool(name) for name in (ROLLOUT, *declared)}
        return waits_for(job, fleet.trainer, pools)


class WaitingEvents:
    """Adds an event whenever the job whose turn it is in a partition begins to wait for something else."""

    def __init__(self, components: Components, views: JobViews) -> None:
        self._components = components
        self._views = views
        self._since: tuple[str, WaitingFor | None, float] = ("", None, 0.0)
        self._shown: tuple[str, WaitingFor | None] = ("", None)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            ring = self._components.fleet.bell.next()
            try:
                await self._look()
            except StoreDown:
                await self._components.store.connection.wait_until_up()
            except NotFound:  # the job has ended, and was deleted since
                pass
            if await waited(ring, LOOK_EVERY_S):
                await asyncio.sleep(GATHER_S)

    async def _look(self) -> None:
        turn = self._components.turn.job
        if turn is None or not self._views.is_first(turn, self._components):
            return
        job = await self._components.store.jobs.get(turn.id)
        found, now = self._views.waits_for(job), asyncio.get_running_loop().time()
        state = (job.id, found.reason if found is not None else None)
        if state != self._since[:2]:
            self._since = (*state, now)
        if state == self._shown or now - self._since[2] < SHOWN_AFTER_S:
            return
        self._shown = state
        if found is not None:
            await self._components.events.add(job.id, events.JobWaiting(reason=found.reason), f"waits: {found.message}")
