"""What people ask of jobs: submit, cancel, pause, resume."""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import InvalidState, refused
from millrace.ids import JobId, new_job_id
from millrace.rest import JobState
from millrace.spec.checking import submission
from millrace.spec.checking.changes import applied
from services.coordinator.bell import Bell
from services.coordinator.observe.events import Events
from services.coordinator.state.job import ACTIVE, ENDED, JobRecord, refusal
from services.coordinator.store import Store

RUNS = [JobState.STARTING, JobState.RUNNING]


class Control:
    def __init__(self, store: Store, events: Events, bell: Bell) -> None:
        self._store = store
        self._events = events
        self._bell = bell
        self._admitting = asyncio.Lock()
        """Held from a look at the outputs of all jobs until a job that may use one is queued."""

    async def submit(self, tree: Any, idempotency_key: str) -> tuple[JobRecord, bool]:
        """The job, and whether it is new. Raises InvalidJob, and InvalidState for a key of another spec.

        An `output` belongs to one job: its checkpoints are no other's to replace.
        """
        spec = await asyncio.to_thread(submission.check, tree)
        job = JobRecord(
            id=new_job_id(),
            name=spec.name,
            state=JobState.QUEUED,
            spec_json=spec.model_dump_json(),
            created_s=time.time(),
        )
        async with self._admitting:
            if not await self._store.jobs.knows(idempotency_key):
                await asyncio.to_thread(_check_output, spec.output, await self._store.jobs.all())
            job_id, new = await self._store.jobs.create(job, idempotency_key)
        if new:
            self._bell.ring()
        return await self._store.jobs.get(job_id), new

    async def cancel(self, job_id: str) -> JobRecord:
        """At once where the job waits, otherwise after what its loop is doing now. Idempotent until the job has ended.

        Raises NotFound, InvalidState.
        """
        job = await self._store.jobs.get(job_id)
        try:
            message, now = f"{job.name} was cancelled", time.time()
            await self._events.move(job.id, JobState.CANCELLED, message, only=[JobState.QUEUED], finished_s=now)
        except InvalidState:
            await self._store.jobs.want(job_id, list(ACTIVE), "cancelled", wanted="cancel")
        return await self._asked(job_id)

    async def pause(self, job_id: str) -> JobRecord:
        """After the step in progress. Idempotent.

        Raises NotFound, InvalidState where the job does not run or is about to be cancelled.
        """
        job = await self._store.jobs.get(job_id)
        if job.state is not JobState.PAUSED or job.wanted == "cancel":
            await self._store.jobs.want(job_id, RUNS, "paused", wanted="pause")
        return await self._asked(job_id)

    async def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> JobRecord:
        """Lets a paused job run again, and queues one that failed or was cancelled again, with `changes` in its spec.

        Raises NotFound, InvalidState where the job is about to be cancelled or there is nothing to resume, InvalidJob
        for changes that are not valid.
        """
        job = await self._store.jobs.get(job_id)
        if job.state in ENDED:
            await self._continue(job, changes or {})
        elif changes:
            what = f"{job_id} is {job.state}: only a job that failed or was cancelled is resumed with changes."
            raise InvalidState(what, f"cancel it first: `millrace cancel {job_id}`.")
        elif job.state is JobState.PAUSED or not await self._taken_back(job.id):
            await self._events.move(job.id, JobState.RUNNING, "running again", only=[JobState.PAUSED], wanted="")
        return await self._asked(job_id)

    async def _continue(self, job: JobRecord, changes: Mapping[str, Any]) -> None:
        """What the end dropped is undone as the job starts: until then it can be cancelled as it is."""
        if job.state is JobState.SUCCEEDED:
            raise refusal(job.id, job.state, "resumed")
        cleared: dict[str, Any] = dict.fromkeys(("failure", "wanted", "finished_s", "report"), "")
        if changes:
            tree, anew = applied(json.loads(job.spec_json), changes)
            cleared["spec_json"] = (await asyncio.to_thread(submission.check, tree)).model_dump_json()
            if anew:
                cleared["configuration"] = ""  # no trainer holds the job as it is now
        async with self._admitting:
            await asyncio.to_thread(_check_checkpoints, job, await self._store.jobs.all())
            await self._events.move(job.id, JobState.QUEUED, _goes_on(job, changes), **cleared)

    async def _taken_back(self, job_id: JobId) -> bool:
        """Takes back a pause that the loop has not come to. False where it came to it first. Raises InvalidState."""
        try:
            await self._store.jobs.want(job_id, RUNS, "resumed", pending="pause", wanted="")
        except InvalidState:
            if (await self._store.jobs.get(job_id)).state is not JobState.PAUSED:
                raise
            return False
        return True

    async def _asked(self, job_id: str) -> JobRecord:
        self._bell.ring()
        return await self._store.jobs.get(job_id)


def _check_output(output: str, jobs: Sequence[JobRecord]) -> None:
    """Raises InvalidJob where another job writes to `output`, or has left checkpoints there."""
    users = _users(output, jobs)
    for job in users:
        if job.state not in ENDED:
            raise refused("output", output, f"{job.id} is {job.state} and writes there", "give another folder.")
    checkpoints = Path(output) / "checkpoints"
    if not any(checkpoints.glob("step-*")):
        return
    fixes = ["give another folder"]
    if users and users[-1].state is not JobState.SUCCEEDED:
        fixes.append(f"continue {users[-1].name} with `millrace resume {users[-1].id}`")
    reason = f"{checkpoints} holds checkpoints of an earlier job, which this one would replace"
    raise refused("output", output, reason, f"{', '.join(fixes)}, or remove them.")


def _check_checkpoints(job: JobRecord, jobs: Sequence[JobRecord]) -> None:
    """Raises InvalidState where the output of a job that is to be continued has become another's."""
    for other in _users(job.output, jobs):
        if other.id == job.id:
            continue
        if other.state not in ENDED:
            what = f"{job.id} cannot be resumed: {other.id} is {other.state} and writes to its output, {job.output}."
            raise InvalidState(what, "submit a new job with another folder.")
        if other.checkpoint and Path(other.checkpoint).is_dir():
            what = f"{job.id} cannot be resumed: the checkpoints in its output, {job.output}, are those of {other.id}."
            raise InvalidState(what, "submit a new job with another folder.")


def _users(output: str, jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """The jobs whose output is this folder, however it is written; the oldest first."""
    folder = os.path.realpath(output)
    return [job for job in jobs if os.path.realpath(job.output) == folder]


def _goes_on(job: JobRecord, changes: Mapping[str, Any]) -> str:
    """From which step: that of the ledger, or the last checkpoint where the trainer holds no more than that."""
    other = f" with {json.dumps(changes)}" if changes else ""
    message, saved = f"{job.name} is queued again{other}: it goes on after step {job.step}", max(0, job.checkpoint_step)
    if saved == job.step:
        return message
    source = f"its checkpoint of step {saved}" if job.checkpoint else "the model"
    return f"{message}, or from {source} where the trainer does not hold that any more"
