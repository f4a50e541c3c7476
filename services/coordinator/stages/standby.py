"""Keeps other trainers ready to take the seat.

A trainer that stands by holds the job from a loading of its own, which is named after that of the trainer in the seat.
After a step that one writes its state, as for a checkpoint, and those that stand by load it. What they hold is thus the
state after a finished step, or nothing: a state that was not written completely has no name yet. If the seat is free,
the next trainer goes on from the newest state that was written.
"""

import asyncio
import shutil
import time
from pathlib import Path

import structlog

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.ids import Version
from millrace.telemetry.metrics.step.timing import STANDBY_COPY
from services.coordinator.fleet.trainer import TrainerLost
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.state.bell import waited
from services.coordinator.state.member import Member, Unconfigured

log = structlog.get_logger(__name__)


def stood_by(run: Run, status: trainer_pb2.TrainerStatus) -> bool:
    """Whether the trainer has stood by since the last loading by the one that was in the seat. Every state that it got
    is then one that the ledger knows."""
    job, member = run.job, run.components.trainer.member
    ours = (status.job_id, status.configuration) == (job.id, job.standby_configuration(member.id))
    return ours and status.state == trainer_pb2.TRAINER_STATE_READY and status.version <= job.version


async def copy_to_standbys(run: Run) -> None:
    """Begins to write the trainer's state for those that stand by, unless there are none, or something is being written
    already. Raises TrainerLost."""
    if run.standing_by is not None and run.standing_by.done():
        run.standing_by.result()
    standby, version = run.standby, run.job.version
    writes = standby.begun or (run.saving is not None and not run.saving.done())
    if run.done or not standby.ready or writes or version <= (await newest_state(run))[0]:
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


async def stand_by(run: Run) -> None:
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
    _, newest = await newest_state(run)
    for folder in await asyncio.to_thread(lambda: list(_copies(run).glob("*-step-*"))):
        if str(folder) != newest:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _copies(run: Run) -> Path:
    return Path(run.spec.output) / "standby"


async def newest_state(run: Run) -> tuple[Version, str]:
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
    fleet, job, (version, folder) = run.components.fleet, run.job, await newest_state(run)
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
