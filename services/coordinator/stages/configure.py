"""Makes trainer and ledger agree on a version, and keeps other trainers ready to take the seat.

While no trainer is there, replicas that hold weights of the job go on. If the trainer comes back at the ledger's
version, no group of that time is generated again. If it comes back at an earlier one, those groups are that have tokens
of a later version.

A trainer that stands by holds the job from a loading of its own, which is named after that of the trainer in the seat.
After a step that one writes its state, as for a checkpoint, and those that stand by load it. What they hold is thus the
state after a finished step, or nothing: a state that was not written completely has no name yet. If the seat is free,
the next trainer goes on from the newest state that was written.
"""

import asyncio
import secrets
import shutil
import time
from pathlib import Path

import structlog

from millrace import events
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import Version
from millrace.rest import JobState
from millrace.spec.passes import why_not_streaming
from millrace.telemetry.metrics.step.timing import STANDBY_COPY
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.fleet.trainer import TrainerLost
from services.coordinator.stages.checkpoint import recover
from services.coordinator.stages.checkpoint_copies import fetch_missing
from services.coordinator.stages.issue import issue
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.stages.spans import traced
from services.coordinator.stages.track import track_again
from services.coordinator.state.bell import waited
from services.coordinator.state.member import Member, Unconfigured

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
    run.standing_by = asyncio.create_task(_stand_by(run))


async def _check_data(run: Run) -> None:
    rows = len(run.source)
    if run.job.rows not in (0, rows):
        what = f"the data has {rows} rows and had {run.job.rows} when the job began."
        raise MillraceError(what, "restore the files as they were, or submit a new job.")
    await run.components.store.jobs.update(run.job.id, rows=rows, steps=run.steps)


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
    if _stood_by(run, status):
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


def _stood_by(run: Run, status: trainer_pb2.TrainerStatus) -> bool:
    """Whether the trainer has stood by since the last loading by the one that was in the seat. Every state that it got
    is then one that the ledger knows."""
    job, member = run.job, run.components.trainer.member
    ours = (status.job_id, status.configuration) == (job.id, job.standby_configuration(member.id))
    return ours and status.state == trainer_pb2.TRAINER_STATE_READY and status.version <= job.version


async def _take_seat(run: Run, held: Version) -> Version:
    """Makes the loading of a trainer that stood by the last one of the job. Answers the version that it holds then: the
    one that it `held`, or a newer one that was written meanwhile, so that no checkpoint is newer than what is trained.
    Raises InvalidState if that state is damaged: the trainer holds no job then."""
    member, (version, folder) = run.components.trainer.member, await _newest(run)
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
        await run.evaluation.forget()
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


async def copy_to_standbys(run: Run) -> None:
    """Begins to write the trainer's state for those that stand by, unless there are none, or something is being written
    already. Raises TrainerLost."""
    if run.standing_by is not None and run.standing_by.done():
        run.standing_by.result()
    standby, version = run.standby, run.job.version
    writes = standby.begun or (run.saving is not None and not run.saving.done())
    if run.done or not standby.ready or writes or version <= (await _newest(run))[0]:
        return
    started, folder = time.monotonic(), str(_copies(run) / f"{run.job.configuration}-step-{version}")
    try:
        async with run.components.trainer.turn:
            request = trainer_pb2.SaveRequest(job_id=run.job.id, path=folder)
            await run.components.trainer.call(TrainerRpc.Save, request)
    except InvalidState as error:
        log.warning("no copy for trainers that stand by", job=run.job.id, version=version, error=str(error))
        return
    standby.begun = folder
    run.components.fleet.bell.ring()
    await run.add_to_row({STANDBY_COPY: time.monotonic() - started})


async def forget_copies(run: Run) -> None:
    """Deletes the state that was written for trainers that stand by."""
    await asyncio.to_thread(shutil.rmtree, _copies(run), ignore_errors=True)


async def _stand_by(run: Run) -> None:
    """Has the trainers that stand by load the job, and whatever newer state is written, until it is cancelled."""
    fleet = run.components.fleet
    while True:
        ring = fleet.bell.next()
        if run.standby.begun:
            await _written(run)
        run.standby.ready = any([await _bring(run, member) for member in fleet.standbys if member.due])
        await waited(ring, LOOK_EVERY_S)


async def _written(run: Run) -> None:
    """Waits until the state that was begun is on the disk, and removes all but the newest one: none is being read."""
    request = trainer_pb2.FinishSaveRequest(job_id=run.job.id, path=run.standby.begun)
    try:
        await run.components.trainer.call(TrainerRpc.FinishSave, request)
    except (InvalidState, NotFound, TrainerLost) as error:
        log.warning("a copy for trainers that stand by failed", path=request.path, error=str(error))
    run.standby.begun = ""
    _, newest = await _newest(run)
    for folder in await asyncio.to_thread(lambda: list(_copies(run).glob("*-step-*"))):
        if str(folder) != newest:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _copies(run: Run) -> Path:
    return Path(run.spec.output) / "standby"


async def _newest(run: Run) -> tuple[Version, str]:
    """Version and folder of the newest state on the disk, copies since the last loading and the last checkpoint; 0 and
    nothing if there is none. A folder that has its name is complete."""
    job = await run.components.store.jobs.get(run.job.id)  # a checkpoint may have been completed since the last look
    name = f"{job.configuration}-step-"
    found = await asyncio.to_thread(lambda: list(_copies(run).glob(f"{name}*")))
    copies = [(Version(int(folder.name.removeprefix(name))), str(folder)) for folder in found]
    saved = (Version(max(0, job.checkpoint_step)), job.checkpoint or "")
    return max([saved, *(copy for copy in copies if copy[0] <= job.version)], key=lambda state: state[0])


async def _bring(run: Run, member: Member) -> bool:
    """Has a trainer that stands by load the newest state, if it does not hold it. Answers whether it holds the job."""
    fleet, job, (version, folder) = run.components.fleet, run.job, await _newest(run)
    own = job.standby_configuration(member.id)
    try:
        status = await fleet.call(member, TrainerRpc.GetStatus, trainer_pb2.TrainerStatusRequest())
        if (status.job_id, status.configuration) != (job.id, own):
            request = trainer_pb2.ConfigureTrainerRequest(
                job_id=job.id, spec=job.spec_for_members, checkpoint=folder, configuration=own
            )
            version = Version((await fleet.call(member, TrainerRpc.Configure, request)).version)
            log.info("a trainer stands by", member=member.id, job=job.id, version=version)
        elif status.version < version:
            await fleet.call(member, TrainerRpc.Load, trainer_pb2.LoadRequest(job_id=job.id, path=folder))
    except MillraceError as error:
        await fleet.suspect(member)
        member.failed()
        await fleet.refused(member, Unconfigured(job.id, job.spec_digest, error, refused=False))
        log.warning("a trainer cannot stand by", member=member.id, job=job.id, error=str(error))
        return False
    member.failures, member.unconfigured = 0, None
    return True
