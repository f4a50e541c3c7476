"""What people do with jobs: submit, cancel, pause, resume; and what of a job's spec may be other when the job is
continued: what it runs with, not what it learns from."""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from millrace.admission import submission
from millrace.admission.submission import with_output
from millrace.errors import InvalidJob, InvalidState, Mistake
from millrace.events import JobWaiting
from millrace.ids import JobId, new_job_id
from millrace.rest import JobState, WaitingFor, WaitingView
from millrace.rest.users import FLEET
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.validation.kinds import leaves
from services.coordinator.jobs.deletion import Deletion
from services.coordinator.jobs.output_folders import OutputFolders
from services.coordinator.observe.events import Events
from services.coordinator.state.bell import Bell
from services.coordinator.state.job import ACTIVE, ENDED, JobRecord, Wanted, placement, refusal, steps_of
from services.coordinator.store import Store

CHANGEABLE = {
    "deadlines": False,
    "tracking": False,
    "webhooks": False,
    "publication": False,
    "reward.workers": False,
    "reward.timeout_s": False,
    "reward.memory_mb": False,
    "rollout.engine_options": False,
    "rollout.cache_policy": False,
    "rollout.lease_s": False,
    "schedule.save_every_steps": False,
    "schedule.keep_checkpoints": False,
    "schedule.keep_checkpoints_days": False,
    "schedule.keep_best": False,
    "schedule.stop_when": False,
    "schedule.save_in_background": True,
    "schedule.partition": False,
    "schedule.priority": False,
    "schedule.preempt": False,
    "schedule.share": False,
    "schedule.steps": True,
    "model.use_shm": True,
    "trainer.token_budget": True,
    "trainer.on_out_of_memory": False,
    "trainer.activation_recompute": True,
    "trainer.backend_options": True,
    "trainer.optimizer": True,
    "trainer.reference": True,
    "trainer.critic": True,
}
"""Fields, or groups of them, and whether the trainer has to load the job anew for it: from its last checkpoint, or from
the model if there is none."""
TOKEN_BUDGETS = {"trainer.token_budget", "trainer.reference.token_budget", "trainer.critic.token_budget"}


def applied(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The spec's tree with the changes in it, and whether the trainer has to load it anew. Of a group the fields that
    are not named stay; null removes an option of an engine or backend. Raises InvalidJob for a field that has to
    stay."""
    anew = False
    for path in _paths(changes):
        allowed = next((name for name in CHANGEABLE if path == name or path.startswith(f"{name}.")), None)
        if allowed is None:
            what = f"{path}: a job that is continued keeps it."
            raise InvalidJob(what, f"submit a new job, or change one of {', '.join(CHANGEABLE)}.")
        anew |= CHANGEABLE[allowed]
    return merged(tree, changes), anew


def gives_token_budget(changes: Mapping[str, Any]) -> bool:
    """Whether the changes name a token budget, of the policy or of a role, be it the one that the spec has."""
    return any(path in TOKEN_BUDGETS for path, _ in leaves(changes))


def _paths(changes: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in changes.items():
        if isinstance(value, Mapping) and value and above + name not in CHANGEABLE:
            yield from _paths(value, f"{above}{name}.")
        else:
            yield above + name


Waits = Callable[[JobRecord], WaitingView | None]
RUNS = [JobState.STARTING, JobState.RUNNING]


class Control:
    """Changes what the store holds of a job, and wakes the job's loop, which carries the change out."""

    def __init__(self, store: Store, events: Events, bell: Bell, waits_for: Waits) -> None:
        """`waits_for`: what a job waits for."""
        self._store = store
        self._events = events
        self._bell = bell
        self._waits_for = waits_for
        self._folders = OutputFolders(store.index)
        self._admitting = asyncio.Lock()
        """Held while the output folder of a job is compared with those of all others, until the job is queued."""
        self.deletion = Deletion(store, self._admitting)

    async def submit(self, tree: Any, idempotency_key: str, user: str = "") -> tuple[JobRecord, bool]:
        """Checks a job spec, given as plain mappings, and queues the job, which belongs to `user`. Returns the job, and
        whether it is new: an `idempotency_key` that this user has used before returns the earlier job.

        An `output` folder belongs to one job, so that no job replaces the checkpoints of another.

        Raises InvalidJob, and InvalidState for a key that was used with another spec.
        """
        began_s, job_id = time.time(), new_job_id()
        if idempotency_key and user not in ("", FLEET):
            idempotency_key = f"{user}/{idempotency_key}"
        asked = with_output(parse(tree), job_id)
        folder = await asyncio.to_thread(os.path.realpath, asked.output)
        new = not await self._store.jobs.knows(idempotency_key)
        used = await self._folders.mistakes(asked.output, folder, user) if new else []
        spec = await asyncio.to_thread(_checked, asked, used)
        job = JobRecord(
            id=job_id,
            name=spec.name,
            state=JobState.QUEUED,
            spec_json=spec.model_dump_json(),
            created_s=time.time(),
            folder=folder,
            tags_json=json.dumps(spec.tags),
            notes=spec.notes,
            user=user,
            **placement(spec),
            **steps_of(spec),
        )
        async with self._admitting:
            new = not await self._store.jobs.knows(idempotency_key)
            if new and (used := await self._folders.mistakes(spec.output, folder, user)):
                raise InvalidJob.of(used)
            job_id, new = await self._store.jobs.create(job, idempotency_key, _digest(tree))
        if new:
            RECORDER.past(SpanKind.SUBMIT, TraceContext.of_step(job.id, 0, 0), began_s, time.time())
            await self._tell_queue(job)
            self._bell.ring()
        return await self._store.jobs.get(job_id), new

    async def _tell_queue(self, job: JobRecord) -> None:
        """Adds an event if the job's turn does not come at once."""
        found = self._waits_for(job)
        if found is not None and found.reason in (WaitingFor.EARLIER_JOB, WaitingFor.QUOTA):
            await self._events.add(job.id, JobWaiting(reason=found.reason), f"waits: {found.message}")

    async def note(self, job_id: str, tags: Sequence[str] | None, notes: str | None) -> JobRecord:
        """Replaces the job's tags, its notes, or both, in any state. Raises NotFound."""
        job = await self._store.jobs.get(job_id)
        fields = {} if tags is None else {"tags_json": json.dumps(list(dict.fromkeys(tags)))}
        fields |= {} if notes is None else {"notes": notes}
        if fields:
            await self._store.jobs.update(job.id, **fields)
        return await self._store.jobs.get(job_id)

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancels the job: at once if it is queued, otherwise after what its loop is doing now. Idempotent until then.

        Raises NotFound, and InvalidState if the job has ended.
        """
        job = await self._store.jobs.get(job_id)
        try:
            message, now = f"{job.name} was cancelled", time.time()
            await self._events.move(
                job.id, JobState.CANCELLED, message, only=[JobState.QUEUED], finished_s=now, **job.clock(now)
            )
        except InvalidState:
            await self._store.jobs.want(job_id, list(ACTIVE), "cancelled", wanted=Wanted.CANCEL)
        return await self._asked(job_id)

    async def pause(self, job_id: str) -> JobRecord:
        """Pauses the job after the step in progress. Idempotent.

        Raises NotFound, and InvalidState if the job does not run or is about to be cancelled.
        """
        job = await self._store.jobs.get(job_id)
        if job.state is not JobState.PAUSED or job.wanted is Wanted.CANCEL:
            await self._store.jobs.want(job_id, RUNS, "paused", wanted=Wanted.PAUSE)
        return await self._asked(job_id)

    async def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> JobRecord:
        """Lets a paused job run again. A job that failed or was cancelled is queued again, with `changes` in its spec.

        Raises NotFound; InvalidState if the job is about to be cancelled or there is nothing to resume; InvalidJob for
        changes that are not valid.
        """
        job = await self._store.jobs.get(job_id)
        if job.state in ENDED:
            await self._continue(job, changes or {})
        elif changes:
            what = f"{job_id} is {job.state}: only a job that failed or was cancelled can be resumed with changes."
            raise InvalidState(what, f"cancel it first: `millrace cancel {job_id}`.")
        elif job.state is JobState.PAUSED or not await self._pause_withdrawn(job.id):
            await self._events.move(
                job.id, JobState.RUNNING, "running again", only=[JobState.PAUSED], wanted=Wanted.NOTHING
            )
        return await self._asked(job_id)

    async def _continue(self, job: JobRecord, changes: Mapping[str, Any]) -> None:
        """Queues an ended job again. Its dropped prompts are issued again only when it starts, so that it can be
        cancelled until then."""
        if job.state is JobState.SUCCEEDED:
            raise refusal(job.id, job.state, "resumed")
        cleared: dict[str, Any] = dict.fromkeys(("failure", "wanted", "finished_s", "report", "gave_way"), "")
        if changes:
            tree, reload = applied(json.loads(job.spec_json), changes)
            spec = await asyncio.to_thread(submission.check, tree)
            cleared |= {"spec_json": spec.model_dump_json(), **placement(spec), "steps": "", **steps_of(spec)}
            if reload:
                cleared["configuration"] = ""  # no trainer has loaded this spec
            if gives_token_budget(changes):
                cleared["token_budget"] = 0
        async with self._admitting:
            await self._folders.check_free_for(job)
            cleared |= job.clock(time.time())
            ended = [JobState.FAILED, JobState.CANCELLED]
            await self._events.move(job.id, JobState.QUEUED, _resumption(job, changes), only=ended, **cleared)

    async def _pause_withdrawn(self, job_id: JobId) -> bool:
        """Withdraws a pause that the loop has not carried out yet. False if the job is paused by now. Raises
        InvalidState."""
        try:
            await self._store.jobs.want(job_id, RUNS, "resumed", pending=Wanted.PAUSE, wanted=Wanted.NOTHING)
        except InvalidState:
            if (await self._store.jobs.get(job_id)).state is not JobState.PAUSED:
                raise
            return False
        return True

    async def _asked(self, job_id: str) -> JobRecord:
        self._bell.ring()
        return await self._store.jobs.get(job_id)


def _checked(spec: JobSpec, used: Sequence[Mistake]) -> JobSpec:
    """The spec as it is stored. Raises InvalidJob with the mistakes `used` and all that the checks find."""
    try:
        checked = submission.check(spec.model_dump(mode="json"))
    except InvalidJob as error:
        raise InvalidJob.of([*used, *error.mistakes], "the job cannot run:") from error
    if used:
        raise InvalidJob.of(used)
    return checked


def _digest(tree: Any) -> str:
    """Names what was asked for: not its id, its day, nor the commits that its names on the hub stand for."""
    return hashlib.sha256(parse(tree).model_dump_json().encode()).hexdigest()


def _resumption(job: JobRecord, changes: Mapping[str, Any]) -> str:
    """The message that says from which step the job continues: that of the ledger if the trainer still holds it,
    otherwise that of the last checkpoint."""
    changed = f" with {json.dumps(changes)}" if changes else ""
    message, saved = (
        f"{job.name} is queued again{changed}: it continues after step {job.step}",
        max(0, job.checkpoint_step),
    )
    if saved == job.step:
        return message
    source = f"its checkpoint of step {saved}" if job.checkpoint else "the model"
    return f"{message}, or from {source} if the trainer does not hold that any more"
