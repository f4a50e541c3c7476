"""What jobs wait for, as their views show it and the event log of the job whose turn it is."""

import asyncio
from dataclasses import replace

from millrace import events
from millrace.errors import NotFound
from millrace.rest import JobSummary, JobView, WaitingFor, WaitingView
from millrace.spec.pool import ROLLOUT
from services.coordinator.stages.run import Components
from services.coordinator.state.bell import waited
from services.coordinator.state.job import JobRecord
from services.coordinator.state.waiting import waits_for
from services.coordinator.store import StoreDown

LOOK_EVERY_S = 1.0
GATHER_S = 0.2
"""Changes of the fleet within this time are looked at together."""
SHOWN_AFTER_S = 2.0
"""An event is added only for what has lasted so long."""


class JobViews:
    """Jobs as people look at them."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def of(self, job: JobRecord) -> JobView:
        return job.view(self.waits_for(job))

    def summary(self, job: JobRecord) -> JobSummary:
        """The job in a list; `job` was read without its spec."""
        turn = self._components.turn.job
        whole = replace(job, spec_json=turn.spec_json) if turn is not None and turn.id == job.id else job
        return job.summary(self.waits_for(whole))

    def waits_for(self, job: JobRecord) -> WaitingView | None:
        fleet, turn = self._components.fleet, self._components.turn.job
        declared = [pool.name for pool in turn.spec.pools] if turn is not None and turn.spec_json else []
        pools = {name: fleet.pool(name) for name in (ROLLOUT, *declared)}
        return waits_for(job, turn, fleet.trainer, pools)


class WaitingEvents:
    """Adds an event whenever the job whose turn it is begins to wait for something else."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._views = JobViews(components)
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
        if (turn := self._components.turn.job) is None:
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
