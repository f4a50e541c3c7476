"""Makes trainer and ledger agree on a version.

While no trainer is there, replicas that hold weights of the job go on. If the trainer comes back at the ledger's
version, no group of that time is generated again. If it comes back at an earlier one, those groups are that have tokens
of a later version.
"""

import asyncio
import secrets
import time

import structlog

from millrace import events
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import InvalidState, MillraceError, Unavailable
from millrace.ids import Version
from millrace.rest import JobState
from millrace.spec.passes import why_not_streaming
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.stages.checkpoint import recover
from services.coordinator.stages.checkpoint_copies import fetch_missing
from services.coordinator.stages.issue import issue
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.stages.spans import traced
from services.coordinator.stages.standby import newest_state, stand_by, stood_by
from services.coordinator.stages.track import track_again
from services.coordinator.state.bell import waited

log = structlog.get_logger(__name__)
SETTLES_S = 0.1
"""How often a trainer is asked whether a loading that was begun has ended."""


@traced(SpanKind.CONFIGURE)
async def configure(run: Run) -> None:
    """Has the trainer load the job, where it does not hold it. If it then holds an earlier version than the ledger, the
    ledger goes back. Raises Unavailable, TrainerLost, and MillraceError where the two cannot agree."""
    run.components.fleet.deadlines.update(run.spec.deadlines.of_calls())
    await _check_data(run)
    await run.refresh()  # replicas lease from here on
    await _trainer_arrived(run)
    run.components.trainer.take()
    await recover(run)
    async with run.components.trainer.turn:
        version = await _load(run)
        await _agree(run, version)
    await run.refresh()
    if run.job.state is JobState.STARTING:
        message = f"running: {run.steps} steps over {len(run.source)} rows"
        await run.components.events.move(run.job.id, JobState.RUNNING, message)
        await run.refresh()
    run.standing_by = asyncio.create_task(stand_by(run))


async def _check_data(run: Run) -> None:
    """Raises MillraceError if the rows are not those that the job began with: it knows its place by their numbers."""
    rows, content, job = len(run.source), run.source.fingerprint, run.job
    fix = "restore the files as they were, or submit a new job."
    if job.rows not in (0, rows):
        raise MillraceError(f"data.files: the data has {rows} rows and had {job.rows} when the job began.", fix)
    if job.data_fingerprint not in ("", content):
        raise MillraceError(f"data.files: the content of {_files(run)} is not that with which the job began.", fix)
    await run.components.store.jobs.update(job.id, rows=rows, data_fingerprint=content, steps=run.steps)


def _files(run: Run) -> str:
    """The data files of a job, for an error."""
    first, *others = run.spec.data.files
    return f"{first} or of {len(others)} more" if others else first


async def _trainer_arrived(run: Run) -> None:
    """Waits for a trainer. Replicas that hold weights of the job go on meanwhile, as far as the staleness bound allows.
    Time in which the job is paused does not count. Raises Unavailable."""
    limit_s, spent_s = run.spec.deadlines.no_replica_s, 0.0
    while run.components.fleet.trainer is None:
        ring = run.components.fleet.bell.next()
        await run.heed()
        await issue(run)
        if run.components.fleet.trainer is None and spent_s > limit_s:
            what = f"no trainer joined the fleet within {limit_s:g} s."
            raise Unavailable(what, "start one, or raise deadlines.no_replica_s.")
        began = time.monotonic()
        await waited(ring, LOOK_EVERY_S)
        spent_s += time.monotonic() - began


async def _load(run: Run) -> Version:
    """The version of this job that the trainer holds, after it was loaded where needed."""
    trainer, job = run.components.trainer, run.job
    status = await _settled(run)
    if await holds_job(run, status):
        await _set_streaming(run, status.microbatches_at_once)
        return Version(status.version)
    if stood_by(run, status):
        try:
            return await _take_seat(run, Version(status.version))
        except InvalidState as error:
            log.warning("a trainer that stood by loads the job again", member=trainer.member.id, error=str(error))
    source = f"checkpoint {job.checkpoint}" if job.checkpoint else run.spec.model.path
    await run.tell(events.TrainerConfiguring(member=trainer.member.id), f"{trainer.member.id} loads {source}")
    await fetch_missing(run)
    configuration = secrets.token_hex(8)
    await run.components.store.jobs.update(job.id, configuration=configuration)
    request = trainer_pb2.ConfigureTrainerRequest(
        job_id=job.id, spec=job.spec_for_members, checkpoint=job.checkpoint or "", configuration=configuration
    )
    member = trainer.member
    member.configuring = True
    try:
        answer = await trainer.call(TrainerRpc.Configure, request)
    finally:
        member.configuring = False
        run.components.fleet.bell.ring()
    reason = await _set_streaming(run, answer.microbatches_at_once)
    warnings = list(answer.warnings)
    told = [*warnings, *([f"each step waits for all of its groups ({reason})"] if reason else [])]
    await run.tell(
        events.TrainerConfigured(member=member.id, version=answer.version, warnings=warnings, whole_steps=reason),
        f"{member.id} holds version {answer.version}: {answer.parameters:,} parameters on {answer.world_size} ranks"
        + "".join(f"; {each}" for each in told),
    )
    return Version(answer.version)


async def _settled(run: Run) -> trainer_pb2.TrainerStatus:
    """The trainer's status, once it does not load a job: it may still load one as it did when it stood by."""
    deadline = time.monotonic() + run.spec.deadlines.of_calls()[TrainerRpc.Configure.key]
    while True:
        status = await run.components.trainer.status()
        if status.state != trainer_pb2.TRAINER_STATE_CONFIGURING or time.monotonic() > deadline:
            return status
        await asyncio.sleep(SETTLES_S)


async def _take_seat(run: Run, held: Version) -> Version:
    """Makes the loading of a trainer that stood by the last one of the job. Answers the version that it holds then: the
    one that it `held`, or a newer one that was written meanwhile, so that no checkpoint is newer than what is trained.
    Raises InvalidState if that state is damaged: the trainer holds no job then."""
    member, (version, folder) = run.components.trainer.member, await newest_state(run)
    if version > held:
        request = trainer_pb2.LoadRequest(job_id=run.job.id, path=folder)
        held = Version((await run.components.trainer.call(TrainerRpc.Load, request)).version)
    status = await run.components.trainer.status()
    await run.components.store.jobs.update(run.job.id, configuration=status.configuration)
    await run.refresh()
    reason = await _set_streaming(run, status.microbatches_at_once)
    event = events.TrainerConfigured(member=member.id, version=held, whole_steps=reason, stood_by=True)
    await run.tell(event, f"{member.id} stood by, and takes the seat with version {held}")
    return held


async def _set_streaming(run: Run, microbatches_at_once: int) -> str:
    """Stores with the job whether the trainer gets groups as they are completed, now that it holds the job. Returns
    why not; empty where it does."""
    run.microbatches_at_once = microbatches_at_once
    reason = why_not_streaming(run.spec) or ("" if microbatches_at_once else "this trainer takes no step in parts")
    if reason != run.job.whole_steps:
        await run.components.store.jobs.update(run.job.id, whole_steps=reason)
    return reason


async def holds_job(run: Run, status: trainer_pb2.TrainerStatus) -> bool:
    """Whether the trainer holds the job from its last loading, at a version that the ledger knows."""
    job, saved = run.job, await run.records.batch()
    usable = status.state not in (trainer_pb2.TRAINER_STATE_FAILED, trainer_pb2.TRAINER_STATE_CONFIGURING)
    ours = (status.job_id, status.configuration) == (job.id, job.configuration)
    one_further = saved is not None and saved.step == status.version == job.version + 1
    return usable and ours and (status.version == job.version or one_further)


async def _agree(run: Run, version: Version) -> None:
    """Takes the ledger back to the trainer's version, or leaves an interrupted step to be finished."""
    trainer, job = run.components.trainer, run.job
    saved = await run.records.batch()
    if version < job.version:
        run.components.queue.running_job = None  # no leases until the ledger has the trainer's version
        await track_again(run, version)
        rewound = await run.prompts.rewind(version)
        await run.forget_evaluation()
        await run.components.fleet.grow()
        event = events.JobRewound(
            version=version,
            lost=job.version,
            prompts=rewound.waiting,
            kept=rewound.kept,
            discarded=rewound.discarded,
        )
        message = (
            f"the trainer is back at version {version} of {job.version}; {rewound.waiting} prompts are issued again; "
            f"of the complete groups {rewound.kept} stay, {rewound.discarded} have tokens of later versions"
        )
        await run.tell(event, message)
        await run.refresh()
    elif version > job.version and not (saved and saved.step == version == job.version + 1):
        what = f"{trainer.member.id} holds version {version} of {job.id}, the ledger is at {job.version}."
        raise MillraceError(what, "restart the trainer: it continues from the last checkpoint.")
    trainer.holds = (job.id, run.job.version) if version <= job.version else None
