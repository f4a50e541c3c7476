"""Checkpoints: one cut through the trainer's state, the ledger and the data's position."""

import asyncio
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import structlog

from millrace.wire.v1 import trainer_pb2
from services.coordinator.run import Run
from services.coordinator.spans import traced

log = structlog.get_logger(__name__)


@traced
async def checkpoint(run: Run) -> None:
    """Saves the version that the trainer holds, where one is due and not saved yet. Raises TrainerLost."""
    step, every = run.job.step, run.spec.schedule.save_every_steps
    due = step > 0 and (run.done or (every > 0 and step % every == 0))
    if not due or run.job.checkpoint_step == step:
        return
    folder = Path(run.spec.output) / "checkpoints" / f"step-{step}"
    started = time.monotonic()
    request = trainer_pb2.SaveRequest(job_id=run.job.id, path=str(folder), huggingface=run.done)
    async with run.parts.trainer.turn:
        saved: trainer_pb2.SaveResponse = await run.parts.trainer.call("Save", request)
    cut = await _cut(run, str(folder))
    await run.records.add_checkpoint(step, cut)
    await run.refresh()
    await _prune(run)
    seconds = time.monotonic() - started
    await run.add_to_row({"timing_s/save_checkpoint": seconds})
    message = f"checkpoint of step {step} in {folder}: {saved.bytes / 1e6:.1f} MB in {seconds:.1f} s"
    await run.tell("checkpoint.saved", message, step=step, path=str(folder), bytes=saved.bytes, seconds=seconds)


async def _cut(run: Run, folder: str) -> dict[str, Any]:
    """What of the coordinator belongs to this checkpoint. Which prompts were trained or dropped by then the ledger
    tells from the step that it keeps of each."""
    job, counts = run.job, await run.prompts.counts()
    cut = {"job": job.id, "step": job.step, "version": job.version, "path": folder, "cursor": job.cursor}
    return cut | {"rows": job.rows, "ledger": dataclasses.asdict(counts)}


async def _prune(run: Run) -> None:
    """Keeps the newest checkpoints and removes the others, folder and record."""
    kept = await run.records.checkpoints()
    for step in list(kept)[: -run.spec.schedule.keep_checkpoints]:
        try:
            await asyncio.to_thread(shutil.rmtree, kept[step]["path"])
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("an old checkpoint stays", path=kept[step]["path"], error=str(error))
        await run.records.remove_checkpoint(step)
