"""Keeps other trainers ready to take the seat.

A trainer that stands by holds the job from a loading of its own, which is named after that of the trainer in the seat.
After a step the trainer in the seat sends it its state, from memory to memory. A trainer with another number of ranks,
or one that a copy did not reach, gets the state over the disk: it is written as for a checkpoint, and loaded there.
What those that stand by hold is thus the state after a finished step, or nothing: a copy is put in place once it is
complete, and a state that was not written completely has no name yet. If the seat is free, the next trainer goes on
from what it holds, or from the newest state on the disk if that is newer.
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
from services.coordinator.fleet.partition import TrainerLost
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.state.bell import waited
from services.coordinator.state.member import Member, Unconfigured

log = structlog.get_logger(__name__)
BY_DISK_STEPS = 8
"""Steps for which one that a copy did not reach gets the state over the disk, before a copy is sent again."""


def stood_by(run: Run, status: trainer_pb2.TrainerStatus) -> bool:
    """Whether the trainer has stood by since the last loading by the one that was in the seat. Every state that it got
    is then one that the ledger knows."""
    job, member = run.job, run.components.trainer.member
    ours = (status.job_id, status.configuration) == (job.id, job.standby_configuration(member.id))
    return ours and status.state == trainer_pb2.TRAINER_STATE_READY and status.version <= job.version


async def copy_to_standbys(run: Run) -> None:
    """Begins to copy the trainer's state to those that stand by, unless the copy before is still under way. The job
    waits only until the state is in the trainer's host memory. Raises TrainerLost."""
    if run.standing_by is not None and run.standing_by.done():
        run.standing_by.result()
    if run.done or not run.standby.held:
        return
    started = time.monotonic()
    if any([await _send(run), await _write(run)]):
        run.components.fleet.bell.ring()
        await run.add_to_row({STANDBY_COPY: time.monotonic() - started})


async def _send(run: Run) -> bool:
    """Has the trainer send its state to those that can receive it, unless it still does so. Answers whether it has
    begun."""
    standby, job = run.standby, run.job
    receivers = [
        member for member in _holders(run) if _in_memory(run, member) and standby.held[member.id] < job.version
    ]
    if not receivers or standby.copies:
        return False
    request = trainer_pb2.CopyStateRequest(
        job_id=job.id, version=job.version, receivers=[member.id for member in receivers]
    )
    try:
        async with run.components.trainer.turn:
            answer = await run.components.trainer.call(TrainerRpc.CopyState, request)
    except InvalidState as error:
        for member in receivers:
            _dropped(run, member, job.version, error)
        return False
    standby.copies = {
        member.id: trainer_pb2.ReceiveStateRequest(
            job_id=job.id,
            configuration=job.standby_configuration(member.id),
            version=job.version,
            rendezvous=rendezvous,
        )
        for member, rendezvous in zip(receivers, answer.rendezvous, strict=False)
    }
    return bool(standby.copies)


async def _write(run: Run) -> bool:
    """Has the trainer write its state for those that cannot receive it, unless something is being written already.
    Answers whether it has begun."""
    standby, version = run.standby, run.job.version
    writes = standby.begun or (run.saving is not None and not run.saving.done())
    if writes or all(_in_memory(run, member) for member in _holders(run)):
        return False
    if version <= (await newest_state(run))[0]:
        return False
    folder = str(_copies(run) / f"{run.job.configuration}-step-{version}")
    try:
        async with run.components.trainer.turn:
            request = trainer_pb2.SaveRequest(job_id=run.job.id, path=folder)
            await run.components.trainer.call(TrainerRpc.Save, request)
    except InvalidState as error:
        log.warning("no copy for trainers that stand by", job=run.job.id, version=version, error=str(error))
        return False
    standby.begun = folder
    return True


def _holders(run: Run) -> list[Member]:
    """The trainers that stand by and hold the job."""
    return [member for member in run.components.fleet.standbys if member.id in run.standby.held]


def _in_memory(run: Run, member: Member) -> bool:
    """Whether the trainer in the seat sends its state to this one. Ranks with the same number hold the same parts."""
    seat, until = run.components.fleet.trainer, run.standby.by_disk_until.get(member.id, 0)
    return seat is not None and seat.world_size == member.world_size and run.job.version >= until


def _dropped(run: Run, member: Member, version: Version, error: MillraceError) -> None:
    run.standby.by_disk_until[member.id] = Version(version + BY_DISK_STEPS)
    log.warning("a copy for a trainer that stands by was dropped", member=member.id, version=version, error=str(error))


async def forget_copies(run: Run) -> None:
    """Deletes the state that was written for trainers that stand by."""
    await asyncio.to_thread(shutil.rmtree, _copies(run), ignore_errors=True)


async def stand_by(run: Run) -> None:
    """Has the trainers that stand by load the job, and gives them each newer state, until it is cancelled. A copy does
    not wait for one that loads the job: that may take minutes."""
    fleet, held = run.components.fleet, run.standby.held
    receiving = asyncio.create_task(_receive(run))
    try:
        while True:
            ring = fleet.bell.next()
            if receiving.done():
                receiving.result()
            if run.standby.begun:
                await _written(run)
            for member in fleet.standbys:
                version = await _bring(run, member) if member.due else None
                if version is None:
                    held.pop(member.id, None)
                else:
                    held[member.id] = max(version, held.get(member.id, version))
            await waited(ring, LOOK_EVERY_S)
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


async def _receive(run: Run) -> None:
    """Has those that stand by receive the copies that the trainer sends, until it is cancelled."""
    while True:
        ring = run.components.fleet.bell.next()
        if run.standby.copies:
            await _received(run)
        await waited(ring, LOOK_EVERY_S)


async def _received(run: Run) -> None:
    """Waits until each copy that is under way is in place, or dropped."""
    fleet, copies = run.components.fleet, run.standby.copies

    async def receive(member: Member) -> None:
        request = copies[member.id]
        try:
            answer = await fleet.call(member, TrainerRpc.ReceiveState, request)
            run.standby.held[member.id] = Version(answer.version)
        except MillraceError as error:
            run.standby.held.pop(member.id, None)  # until it says what it holds
            await fleet.suspect(member)
            _dropped(run, member, Version(request.version), error)

    await asyncio.gather(*(receive(member) for member in fleet.standbys if member.id in copies))
    run.standby.copies = {}


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


async def _bring(run: Run, member: Member) -> Version | None:
    """Has a trainer that stands by load the newest state on the disk, if it does not hold the job, or holds an earlier
    one and is sent no copies. Returns the version that it holds; None if it cannot hold the job."""
    fleet, job, (version, folder) = run.components.fleet, run.job, await newest_state(run)
    own = job.standby_configuration(member.id)
    try:
        status = await fleet.call(member, TrainerRpc.GetStatus, trainer_pb2.TrainerStatusRequest())
        held = Version(status.version)
        if (status.job_id, status.configuration) != (job.id, own):
            request = trainer_pb2.ConfigureTrainerRequest(
                job_id=job.id, spec=job.spec_for_members, checkpoint=folder, configuration=own
            )
            held = Version((await fleet.call(member, TrainerRpc.Configure, request)).version)
            log.info("a trainer stands by", member=member.id, job=job.id, version=held)
        elif held < version and not _in_memory(run, member):
            load = trainer_pb2.LoadRequest(job_id=job.id, path=folder)
            held = Version((await fleet.call(member, TrainerRpc.Load, load)).version)
    except MillraceError as error:
        await fleet.suspect(member)
        member.failed()
        await fleet.refused(member, Unconfigured(job.id, job.spec_digest, error, refused=False))
        log.warning("a trainer cannot stand by", member=member.id, job=job.id, error=str(error))
        return None
    member.failures, member.unconfigured = 0, None
    return held
