"""Sends a job's step metrics to the experiment trackers that its spec names."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from millrace import events
from millrace.ids import Version
from millrace.rest import StepMetrics
from millrace.telemetry import trackers
from services.coordinator.run import Run

Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)

NOTE = "tracked"
"""The last step whose row was sent."""
LIMIT_S = 60.0
"""For whatever a tracker does at once. One that takes longer is given up."""


class TrackerFailed(Exception):
    """What a tracker raised."""


class TrackerHangs(Exception):
    """It did not come back in time, and may never."""


@dataclass(frozen=True)
class Watched:
    """A tracker that can neither hold up its job's end nor fail it."""

    name: str
    tracker: trackers.Tracker

    def __str__(self) -> str:
        return self.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.log(step, values)

    def close(self) -> None:
        try:
            _begun(self.tracker.close).result(LIMIT_S)
        except (TrackerFailed, TimeoutError) as error:
            log.warning("a tracker was not closed", tracker=self.name, error=str(error))


async def track(run: Run) -> None:
    """Sends the rows that were not sent yet. A tracker that fails or hangs costs its rows, never the job."""
    if not run.spec.tracking.trackers:
        return
    if run.trackers is None:
        run.trackers = await _opened(run)
    sent = await run.records.note(NOTE)
    rows = await run.records.rows(-1 if sent is None else sent, run.job.step)
    for tracker in list(run.trackers):
        if not await _sent(run, tracker, rows):
            run.trackers.remove(tracker)
    await run.records.set_note(NOTE, run.job.step)


async def track_again(run: Run, version: Version) -> None:
    """The steps after `version` are trained once more: their new rows are to be sent too."""
    sent = await run.records.note(NOTE)
    if sent is not None:
        await run.records.set_note(NOTE, min(sent, version))


async def _opened(run: Run) -> list[trackers.Tracker]:
    about = trackers.Run(
        job_id=run.job.id,
        name=run.job.name,
        project=run.spec.tracking.project,
        folder=Path(run.spec.output),
        spec=run.spec.model_dump(mode="json"),
    )
    opened: list[trackers.Tracker] = []
    for name in run.spec.tracking.trackers:
        try:
            (tracker,) = await _within_limit(partial(trackers.opened, [name], about))
        except (TrackerFailed, TrackerHangs) as error:
            await run.tell(events.TrackerFailed(tracker=name), f"{name} is given up, it could not be opened: {error}")
        else:
            opened.append(Watched(name, tracker))
    return opened


async def _sent(run: Run, tracker: trackers.Tracker, rows: Sequence[StepMetrics]) -> bool:
    """Whether the tracker can be used further."""
    try:
        await _within_limit(partial(_log, tracker, rows))
    except TrackerFailed as error:
        await run.tell(events.TrackerFailed(tracker=str(tracker)), f"{tracker} did not take what it was sent: {error}")
    except TrackerHangs as error:
        await run.tell(events.TrackerFailed(tracker=str(tracker)), f"{tracker} is given up: {error}")
        return False
    return True


def _log(tracker: trackers.Tracker, rows: Sequence[StepMetrics]) -> None:
    for row in rows:
        tracker.log(row.step, row.values)


async def _within_limit(work: Callable[[], Answer]) -> Answer:
    """Raises TrackerFailed, TrackerHangs."""
    answer = asyncio.wrap_future(_begun(work))
    done, _ = await asyncio.wait({answer}, timeout=LIMIT_S)
    if not done:
        raise TrackerHangs(f"it did not come back within {LIMIT_S:g} s.")
    return answer.result()


def _begun(work: Callable[[], Answer]) -> "Future[Answer]":
    """`work`, in a thread that ends with the process: nobody has to wait for one that hangs."""
    answer: Future[Answer] = Future()
    answer.set_running_or_notify_cancel()

    def do() -> None:
        try:
            found = work()
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}"[:500]
            answer.set_exception(TrackerFailed(told.encode(errors="backslashreplace").decode()))
        else:
            answer.set_result(found)

    threading.Thread(target=do, name="tracker", daemon=True).start()
    return answer
