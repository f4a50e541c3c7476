"""Sends a job's series to the experiment trackers that its spec names."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from millrace.rest import StepMetrics
from millrace.telemetry import trackers
from services.coordinator.run import Run

NOTE = "tracked"
"""The last step whose row was sent."""


async def track(run: Run) -> None:
    """Sends the rows that were not sent yet. A tracker that fails costs its rows, never the job."""
    names = run.spec.tracking.trackers
    if not names:
        return
    if run.trackers is None:
        about = trackers.Run(
            job_id=run.job.id,
            name=run.job.name,
            project=run.spec.tracking.project,
            folder=Path(run.spec.output),
            spec=run.spec.model_dump(mode="json"),
        )
        run.trackers = await asyncio.to_thread(trackers.opened, names, about)
    sent = await run.records.note(NOTE)
    rows = await run.records.rows(-1 if sent is None else sent, run.job.step)
    try:
        await asyncio.to_thread(_log, run.trackers, rows)
    except (OSError, RuntimeError, ValueError) as error:
        await run.tell("tracker.failed", f"a tracker failed: {type(error).__name__}: {error}")
    await run.records.set_note(NOTE, run.job.step)


def _log(opened: Sequence[trackers.Tracker], rows: Sequence[StepMetrics]) -> None:
    for row in rows:
        for tracker in opened:
            tracker.log(row.step, row.values)
