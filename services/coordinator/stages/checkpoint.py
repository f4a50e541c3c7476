"""Checkpoints: the trainer's state, with the ledger and the position in the data at the same step (the cut).

Training continues while the trainer writes. A checkpoint counts as soon as it is on disk, and not before. Until then
its cut is kept as a note: after a crash, the next coordinator asks the trainer how the checkpoint ended.
"""

import asyncio
import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from millrace import events
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.stages.checkpoint_copies import begin_copy, remove_copy
from services.coordinator.stages.run import GaveWay, Run
from services.coordinator.stages.spans import traced
from services.coordinator.stages.standby import newest_state

log = structlog.get_logger(__name__)

NOTE = "saving"
"""The cut of the checkpoint that the trainer is writing."""
BEST = "best"
"""The note with the step of the best checkpoint, and the name of the link to it."""
BACKGROUND = "timing_s/save_checkpoint_background"
"""Seconds from the begin of a save until it is on disk, in the row of the step after which this was noticed."""


class SaveFailed(MillraceError):
    """A checkpoint could not be written, and the job's events say so."""


@traced(SpanKind.CHECKPOINT)
async def checkpoint(run: Run) -> None:
    """Begins a checkpoint of the version that the trainer holds, where one is due and not saved yet. After the last
    step it also waits for the checkpoint. A checkpoint that fails is skipped; if the last one fails, the job fails.

    Raises TrainerLost, SaveFailed.
    """
    step, every = run.job.step, run.spec.schedule.save_every_steps
    due = step > 0 and (run.done or (every > 0 and step % every == 0)) and run.job.checkpoint_step != step
    if not due and not (run.saving and run.saving.done()):
        return
    started = time.monotonic()
    with contextlib.suppress(SaveFailed):  # of an earlier step
        await _settle(run)
    if not due:
        return
    try:
        await _begin(run)
        if run.done or not run.spec.schedule.save_in_background:
            await _settle(run)
    except SaveFailed:
        if run.done:
            raise
    await run.add_to_row({"timing_s/save_checkpoint": time.monotonic() - started})


async def give_way(run: Run) -> None:
    """Raises GaveWay where another job has the turn now, once the state of this step is on the disk. If it cannot be
    saved the job goes on, and tries again after its next step. Raises TrainerLost."""
    if run.preempted_by is None or await run.preempted_by() is None:
        return
    try:
        with contextlib.suppress(SaveFailed):  # of an earlier step
            await _settle(run)
        if run.job.checkpoint_step != run.job.step:
            await _begin(run)
            await _settle(run)
    except SaveFailed as error:
        log.warning("the job does not give way", job=run.job.id, error=str(error))
        return
    if (other := await run.preempted_by()) is not None:  # it may have been cancelled meanwhile
        raise GaveWay(other)


async def save_before_it_leaves(run: Run) -> None:
    """Has a trainer that drains save the step that it holds, whatever `schedule.save_every_steps` says, and waits for
    that: the next one goes on from there. Not where one that stands by has loaded that step from the disk. Raises
    TrainerLost if the trainer is gone before."""
    await recover(run)
    job = run.job
    if job.step in (0, job.checkpoint_step) or (run.standby.held and (await newest_state(run))[0] == job.version):
        return
    status = await run.components.trainer.status()
    if (status.job_id, status.configuration, status.version) != (job.id, job.configuration, job.version):
        return
    try:
        await _begin(run)
        await _settle(run)
    except MillraceError as error:  # also of a rank without memory for it: the job goes on from an earlier checkpoint
        log.warning("a trainer leaves without a checkpoint", job=job.id, step=job.step, error=str(error))


async def recover(run: Run) -> None:
    """Finds out how a checkpoint ended that was being written when the loop was interrupted. Raises TrainerLost."""
    try:
        await _finish(run)
    except SaveFailed as error:
        log.warning("a checkpoint was lost", job=run.job.id, error=str(error))
    await run.refresh()
    begin_copy(run)


async def _begin(run: Run) -> None:
    """Notes the cut, then asks the trainer to save. Raises TrainerLost, SaveFailed.

    A folder that is in the way is of steps that the ledger has forgotten, by a restored backup or a lost Redis. It goes
    before the cut is noted: from then on a folder of that name is the checkpoint of this cut.
    """
    folder = str(Path(run.spec.output) / "checkpoints" / f"step-{run.job.step}")
    cut = await _cut(run, folder)
    try:
        await asyncio.to_thread(shutil.rmtree, folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise await _failed(run, cut, f"an older one there cannot be removed: {error.strerror}.") from error
    await run.records.set_note(NOTE, cut)
    request = trainer_pb2.SaveRequest(job_id=run.job.id, path=folder, huggingface=run.done)
    try:
        async with run.components.trainer.turn:
            await run.components.trainer.call(TrainerRpc.Save, request)
    except InvalidState as error:
        raise await _failed(run, cut, str(error)) from error
    run.saving = asyncio.create_task(_finish(run))


async def _settle(run: Run) -> None:
    """Waits until the save in progress has ended. Raises TrainerLost, SaveFailed."""
    task, run.saving = run.saving, None
    seconds = None if task is None else await task
    await run.refresh()
    if seconds is not None:
        await run.add_to_row({BACKGROUND: seconds})


async def _finish(run: Run) -> float | None:
    """Waits until the checkpoint that was begun, if any, is on disk, and makes it the job's newest. Answers the seconds
    that it took; None if no checkpoint was begun, or the trainer that began it is gone.

    Raises SaveFailed. Raises TrainerLost, and then the checkpoint stays noted.
    """
    cut = await run.records.note(NOTE)
    if cut is None:
        return None
    saved: trainer_pb2.FinishSaveResponse | None = None
    try:
        request = trainer_pb2.FinishSaveRequest(job_id=run.job.id, path=cut["path"])
        saved = await run.components.trainer.call(TrainerRpc.FinishSave, request)
    except NotFound as error:
        # Another trainer began it. A checkpoint gets its name when it is complete.
        if not await asyncio.to_thread(Path(cut["path"]).is_dir):
            raise await _failed(run, cut, "the trainer was lost while it wrote it.") from error
    except InvalidState as error:
        raise await _failed(run, cut, str(error)) from error
    await run.records.add_checkpoint(cut["step"], cut)
    await run.records.set_note(NOTE, None)
    begin_copy(run)
    await _prune(run)
    message, data = (
        f"checkpoint of step {cut['step']} in {cut['path']}",
        events.CheckpointSaved(step=cut["step"], path=cut["path"]),
    )
    if saved is None:
        await run.tell(data, f"{message}, written before the trainer was lost")
        return None
    message = f"{message}: {saved.bytes / 1e6:.1f} MB in {saved.seconds:.1f} s"
    await run.tell(data.model_copy(update={"bytes": saved.bytes, "seconds": saved.seconds}), message)
    return saved.seconds


async def _failed(run: Run, cut: dict[str, Any], why: str) -> SaveFailed:
    await run.records.set_note(NOTE, None)
    message = f"the checkpoint of step {cut['step']} was not saved: {why}"
    await run.tell(events.CheckpointFailed(step=cut["step"], path=cut["path"]), message)
    return SaveFailed(message)


async def _cut(run: Run, folder: str) -> dict[str, Any]:
    """The coordinator's state that belongs to the checkpoint of this step. For each prompt the ledger keeps the step at
    which it was trained or dropped."""
    job, counts = run.job, await run.prompts.counts()
    cut: dict[str, Any] = {
        "saved_s": time.time(),
        "job": job.id,
        "step": job.step,
        "version": job.version,
        "path": folder,
        "cursor": job.cursor,
    }
    return cut | {"rows": job.rows, "ledger": dataclasses.asdict(counts)}


async def keep_best(run: Run) -> None:
    """Notes the best checkpoint by `schedule.keep_best`, and links `checkpoints/best` to it. Says when it is another
    one."""
    if run.spec.schedule.keep_best is None:
        return
    kept = await run.records.checkpoints()
    best = await _best(run, kept)
    if best is None or await run.records.note(BEST) == best[0]:
        return
    step, value = best
    path, metric = kept[step]["path"], run.spec.schedule.keep_best.removeprefix("-")
    await asyncio.to_thread(_link, Path(path))
    await run.records.set_note(BEST, step)
    event = events.CheckpointBest(step=step, path=path, metric=metric, value=value)
    await run.tell(event, f"the checkpoint of step {step} is the best so far: {metric} {value:.4g}")
    await _prune(run)


async def _best(run: Run, kept: Mapping[int, Any]) -> tuple[int, float] | None:
    """The step of the checkpoint with the best value of `schedule.keep_best`, the newest of equals, and the value."""
    wanted = run.spec.schedule.keep_best
    if wanted is None:
        return None
    metric, sign = wanted.removeprefix("-"), -1.0 if wanted.startswith("-") else 1.0
    values = {step: (await run.records.row(step) or {}).get(metric) for step in kept}
    found = [(sign * value, step) for step, value in values.items() if value is not None and math.isfinite(value)]
    return (max(found)[1], sign * max(found)[0]) if found else None


def _link(folder: Path) -> None:
    """Makes the link `best` beside the folder, in one step. A file system without links is not an error."""
    made = folder.parent / f".{BEST}.new"
    try:
        made.unlink(missing_ok=True)
        made.symlink_to(folder.name, target_is_directory=True)
        made.rename(folder.parent / BEST)
    except OSError as error:
        log.warning("no link to the best checkpoint", path=str(folder), error=str(error))


async def _prune(run: Run) -> None:
    """Removes all but the newest checkpoints and the best one, folder and record. The newest of all stays, however old
    it is."""
    kept = await run.records.checkpoints()
    best, schedule, steps = await _best(run, kept), run.spec.schedule, list(kept)
    beyond = steps[: -schedule.keep_checkpoints]
    if schedule.keep_checkpoints_days is not None:
        oldest_s = time.time() - schedule.keep_checkpoints_days * 86400
        # The cuts of release 0.1 have no time.
        beyond = [step for step in steps[:-1] if step in beyond or kept[step].get("saved_s", oldest_s) < oldest_s]
    for step in beyond:
        if best is not None and step == best[0]:
            continue
        try:
            await asyncio.to_thread(shutil.rmtree, kept[step]["path"])
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("an old checkpoint could not be removed", path=kept[step]["path"], error=str(error))
        try:
            await remove_copy(schedule.checkpoint_store, run.job.id, step)
        except MillraceError as error:
            log.warning("an old copy of a checkpoint could not be removed", step=step, error=str(error))
        await run.records.remove_checkpoint(step)
