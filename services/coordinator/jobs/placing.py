"""Gives each partition its next job, and says what jobs wait for, in their views and in the event log of the job whose
turn it is."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from millrace import events
from millrace.errors import InvalidState, NotFound
from millrace.rest import JobState, JobSummary, JobView, MemberKind, WaitingFor, WaitingView
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.coordinator.stages.run import Components, Shared
from services.coordinator.state.bell import Bell, waited
from services.coordinator.state.job import JobRecord
from services.coordinator.state.waiting import (
    Place,
    Preemption,
    Quota,
    next_for,
    preempted_by,
    waits_for,
    waits_for_turn,
)


class Placing:
    """All partitions, and which job runs where. A partition runs at most one job, and an active job is in exactly one
    partition: it is recorded with the job in the same transition in which the job starts."""

    def __init__(self, shared: Shared, quota: Quota, preemption: Preemption, *, shares_replicas: bool = False) -> None:
        """`shares_replicas`: whether replicas that are free are handed over to the jobs of other partitions."""
        self.shared = shared
        self._shares_replicas = shares_replicas
        self.quota = quota
        self._preemption = preemption
        self.partitions: dict[str, Components] = {}
        self.added = Bell()
        """Rings when there is another partition."""
        self._choosing = asyncio.Lock()
        """Held from the look at the active jobs until another one is active: two partitions could spend a user's quota
        twice."""
        shared.whole_fleet.on_partition(self._add)
        shared.whole_fleet.add_partition(DEFAULT_PARTITION)

    def _add(self, name: str) -> None:
        self.partitions[name] = Components.of(self.shared, name)
        self.added.ring()

    async def load(self) -> None:
        """Adds the partitions in which jobs were active when the coordinator before this one ended."""
        for job in await self.shared.store.index.active():
            self.shared.whole_fleet.add_partition(job.place)

    def of(self, job: JobRecord) -> Components:
        """The partition of a job that has begun."""
        return self.partitions.get(job.place, self.partitions[DEFAULT_PARTITION])

    def places(self) -> Sequence[Place]:
        """The partitions as they are now."""
        pools: dict[str, set[str]] = {}
        for member in self.shared.whole_fleet.of_kind(MemberKind.ROLLOUT):
            if not member.draining:
                pools.setdefault(member.partition, set()).add(member.pool)
        lends = self._shares_replicas and any(map(self._can_give, self.partitions.values()))
        return [
            Place(name, each.turn, each.fleet.trainer is not None, pools.get(name, ()), lends)
            for name, each in self.partitions.items()
        ]

    def _can_give(self, components: Components) -> bool:
        """Whether a partition has a replica that can be handed over: its job, if it has one, keeps another one."""
        replicas = components.fleet.replicas
        return any(not m.home for m in replicas) and (components.turn.running is None or len(replicas) > 1)

    async def next(self, components: Components) -> JobRecord | None:
        """The job that has begun in a partition; else the queued one that comes next there, if there is a trainer for
        it. Raises StoreDown, Superseded."""
        async with self._choosing:
            active = await self.shared.store.index.active()
            begun = next((job for job in active if job.place == components.fleet.name), None)
            if begun is not None:
                job = await self.shared.store.jobs.get(begun.id)
                components.turn.running, components.turn.waiting = job, None
                return job
            return await self._start(components, active)

    async def preempted_by(self, components: Components) -> JobRecord | None:
        """The queued job for which the one that runs in a partition gives way now; None if it goes on."""
        if not self._preemption.after_s:
            return None
        index = self.shared.store.index
        jobs = (await index.queued(), await index.active(), self.places(), self.quota)
        return preempted_by(components.fleet.name, *jobs, self._preemption, time.time())

    async def _start(self, components: Components, active: Sequence[JobRecord]) -> JobRecord | None:
        store, turn, name = self.shared.store, components.turn, components.fleet.name
        found = next_for(name, await store.index.queued(), active, self.places(), self.quota)
        queued = await store.jobs.get(found.id) if found is not None else None
        turn.running, turn.waiting = None, queued
        if queued is None or components.fleet.trainer is None:
            return None
        message = "starting: trainer and replicas load the model"
        if len(self.partitions) > 1:
            message = f"starting in the partition {name}: trainer and replicas load the model"
        try:
            started = {**queued.clock(time.time()), "started_step": queued.step, "gave_way": ""}
            await self.shared.events.move(queued.id, JobState.STARTING, message, partition=name, **started)
        except InvalidState:  # it was cancelled meanwhile
            return None
        began_s = queued.since_s or queued.created_s
        RECORDER.past(SpanKind.JOB_QUEUE, TraceContext.of_step(queued.id, 0, 0), began_s, time.time())
        turn.running, turn.waiting = await store.jobs.get(queued.id), None
        return turn.running


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
            async with self._components.store.connection.outlasted():
                with contextlib.suppress(NotFound):  # the job has ended, and was deleted since
                    await self._look()
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
