"""Runs jobs, one after another in each partition: takes the next, runs its loop, and records how it ended.

Where the loop is interrupted by something that is not the job's fault (Redis, the trainer, a restart of this process),
the answer is always the same: wait until that is back, and start the loop again from what the store holds.
"""

import asyncio
import contextlib
import time
import uuid
from functools import partial
from typing import Literal

import structlog

from millrace import events, hub
from millrace.data import PromptSource, open_section
from millrace.drops import DropReason
from millrace.errors import InvalidState, MillraceError, Unavailable
from millrace.ids import JobId
from millrace.rest import JobState
from services.coordinator.fleet.partition import TrainerLeft, TrainerLost
from services.coordinator.jobs.loop import train
from services.coordinator.jobs.placing import JobViews, Placing, WaitingEvents
from services.coordinator.stages.checkpoint import recover, save_before_it_leaves
from services.coordinator.stages.checkpoint_copies import copies_done
from services.coordinator.stages.report import report
from services.coordinator.stages.run import Cancelled, Components, GaveWay, Run
from services.coordinator.stages.standby import forget_copies
from services.coordinator.state.bell import waited
from services.coordinator.state.faults import TRAINER_BUDGET
from services.coordinator.state.job import JobRecord, Wanted
from services.coordinator.store import StoreDown, Superseded

log = structlog.get_logger(__name__)
WORDS_S = 5.0
"""Seconds to wait for the next life of a lost trainer, which reports how the one before ended."""
LOOK_EVERY_S = 5.0


async def run_partitions(placing: Placing) -> None:
    """Runs the jobs of all partitions, of a new one as soon as it has a member. Raises Superseded."""
    views, begun, tasks = JobViews(placing), set[str](), set[asyncio.Task[None]]()
    try:
        while True:
            another = asyncio.create_task(placing.added.next().wait())
            for name in placing.partitions.keys() - begun:
                each = placing.partitions[name]
                work = (each.queue.expire(), WaitingEvents(each, views).run(), Runner(each, placing).run())
                tasks |= {asyncio.create_task(one) for one in work}
                begun.add(name)
            try:
                done, _ = await asyncio.wait({*tasks, another}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                another.cancel()
            for task in done & tasks:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Runner:
    """Runs the jobs of one partition."""

    def __init__(self, components: Components, placing: Placing) -> None:
        self._components = components
        self._placing = placing

    async def run(self) -> None:
        """Runs jobs until cancelled. Raises Superseded."""
        while True:
            ring = self._components.control.next()
            try:
                await self._components.store.leadership.still_ours()
                if job := await self._placing.next(self._components):
                    await self._run_job(job)
                    continue
            except StoreDown as error:
                log.warning("waiting for Redis", error=str(error))
                await self._components.store.connection.wait_until_up()
                continue
            await waited(ring, LOOK_EVERY_S if self._components.fleet.trainer else 1.0)

    async def _run_job(self, job: JobRecord) -> None:
        """Runs a job to its end, or until the trainer is lost: then the job is still active.

        Raises StoreDown, Superseded.
        """
        run: Run | None = None
        goes_on = False
        try:
            if job.failure:
                return await self._fail(job.id, None, job.failure)
            run = await self._opened(job)
            await self._train(run)
            await self._end(run.job.id, run, JobState.SUCCEEDED, "finished", DropReason.JOB_SUCCEEDED)
        except (StoreDown, Superseded):
            raise
        except Cancelled as cancelled:
            await self._end(job.id, run, JobState.CANCELLED, str(cancelled), DropReason.JOB_CANCELLED)
        except GaveWay as gave:
            assert run is not None
            await self._back_to_queue(run, gave.other)
        except TrainerLeft as left:
            await self._handed_over(job, run, left)
            goes_on = True
        except TrainerLost as lost:
            goes_on = await self._set_back(job, run, lost)
        except MillraceError as error:
            await self._fail(job.id, run, str(error))
        except Exception as error:
            log.exception("a bug ended a job", job=job.id)
            await self._fail(job.id, run, f"a bug in the coordinator: {type(error).__name__}: {error}")
        finally:
            if not goes_on:
                self._components.queue.running_job = None
            self._components.turn.over()
            self._components.trainer.release()

    async def _opened(self, job: JobRecord) -> Run:
        """Opens the job's data. Raises InvalidJob if it has gone since the submission, Unavailable if it is on
        the hub and not in the cache, and the hub does not answer."""
        here = await asyncio.to_thread(hub.local, job.spec, data=True)
        source = await asyncio.to_thread(open_section, here, "data")
        held_out = await asyncio.to_thread(open_section, here, "evaluation")
        assert source is not None
        await self._tell_data(job, source, held_out)
        run = Run(job, self._components, source, held_out)
        run.preempted_by = partial(self._placing.preempted_by, self._components)
        return run

    async def _tell_data(self, job: JobRecord, source: PromptSource, held_out: PromptSource | None) -> None:
        """Says once, before the job issues its first prompt, what is taken for what in its rows."""
        if job.cursor:
            return
        sections: dict[Literal["data", "evaluation"], PromptSource | None] = {"data": source, "evaluation": held_out}
        for section, opened in sections.items():
            if opened is not None and (lines := opened.description):
                event = events.DataOpened(section=section, rows=len(opened), description=lines)
                message = f"{section}: {len(opened)} rows; {'; '.join(lines)}"
                await self._components.events.add(job.id, event, message)

    async def _train(self, run: Run) -> None:
        """Runs the job's loop and, at the same time, the joining of replicas. The first error ends both."""
        loop, joining = asyncio.create_task(train(run)), asyncio.create_task(run.joining.run())
        try:
            await asyncio.wait({loop, joining}, return_when=asyncio.FIRST_COMPLETED)
            for task in (loop, joining):
                if task.done():
                    task.result()
        finally:
            others = (run.saving, run.copying, run.standing_by)
            begun = [loop, joining, *(each for each in others if each is not None)]
            for each in begun:
                each.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            await asyncio.to_thread(run.close)

    async def _handed_over(self, job: JobRecord, run: Run | None, left: TrainerLeft) -> None:
        """Waits for the checkpoint of a trainer that drains: the next one begins with it. A trainer that was asked to
        leave is not counted."""
        if run is not None:
            with contextlib.suppress(TrainerLost):
                await save_before_it_leaves(run)
        event = events.TrainerLeft(member=left.member, step=run.job.step if run else job.step)
        await self._components.events.add(job.id, event, str(left))

    async def _set_back(self, job: JobRecord, run: Run | None, lost: TrainerLost) -> bool:
        """Waits before the loop starts again. A job that loses its trainer repeatedly at the same step fails. Answers
        whether the job goes on: replicas then lease its prompts all the time."""
        deaths, step = self._components.store.deaths(job.id), run.job.step if run else job.step
        setbacks = await deaths.set_back(step, uuid.uuid4().hex)
        event = events.TrainerLost(step=step, setbacks=setbacks)
        await self._components.events.add(job.id, event, str(lost))
        if setbacks <= TRAINER_BUDGET:
            await waited(self._components.control.next(), 0.5 * setbacks)  # a request, as to cancel, is heeded at once
            return True
        self._components.queue.running_job = None
        await self._trainer_is_back(WORDS_S)
        why = await deaths.words() or lost.what
        what = f"the trainer was lost {setbacks} times at step {step + 1}: {why}"
        fix = f"remove the cause, then continue with `millrace resume {job.id}`."
        await self._fail(job.id, run, str(Unavailable(what, fix)))
        return False

    async def _trainer_is_back(self, within_s: float) -> None:
        """Waits for a trainer, at most so long."""
        fleet, deadline = self._components.fleet, time.monotonic() + within_s
        while fleet.trainer is None and (left_s := deadline - time.monotonic()) > 0:
            await waited(fleet.bell.next(), min(left_s, 1.0))

    async def _back_to_queue(self, run: Run, other: JobRecord) -> None:
        """Moves a job that has saved its last step back to the queue, in one transition with the end of its ledger.
        What was in flight is issued again when it starts, or when the loop begins anew because it runs on."""
        await run.forget_evaluation()
        await copies_done(run)
        await forget_copies(run)
        job, now = await self._components.store.jobs.get(run.job.id), time.time()
        why = f"it gave way after step {job.step}"
        whom = f"{other.named_for(job)}, whose priority is {other.priority}"
        message = f"{job.name} gives way to {whom}; it is queued again with its checkpoint of step {job.step}"
        await self._components.store.prompts(job.id).prepare_close(job.step + 1, DropReason.JOB_PREEMPTED)
        with contextlib.suppress(InvalidState):  # meanwhile somebody asked for a pause or cancelled it: it runs on
            await self._components.events.move(
                job.id,
                JobState.QUEUED,
                message,
                [JobState.RUNNING],
                pending=Wanted.NOTHING,
                gave_way=why,
                **job.clock(now),
            )
        self._components.control.ring()

    async def _fail(self, job_id: JobId, run: Run | None, failure: str) -> None:
        """Records the failure first: after a crash in the middle of this, the job is ended and not run again."""
        await self._components.store.jobs.update(job_id, failure=failure)
        await self._end(job_id, run, JobState.FAILED, failure, DropReason.JOB_FAILED)

    async def _end(self, job_id: JobId, run: Run | None, state: JobState, message: str, reason: DropReason) -> None:
        """Closes the ledger, waits for a checkpoint in progress, writes the report; then moves the job to `state`."""
        job = await self._components.store.jobs.get(job_id)
        await self._components.store.prompts(job_id).close(job.step + 1, reason)
        if run is not None:
            await run.forget_evaluation()
            with contextlib.suppress(TrainerLost):
                await recover(run)
            await copies_done(run)
            await forget_copies(run)
            await run.refresh()
            await report(run, state, message)
        now = time.time()
        await self._components.events.move(job_id, state, message, finished_s=now, **job.clock(now))
