"""Sends a job's step metrics and samples to the experiment trackers that its spec names."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from millrace import events, trackers
from millrace.errors import InvalidJob
from millrace.ids import Version
from millrace.rest import SampleView, StepMetrics
from millrace.telemetry.spans.kinds import SpanKind
from millrace.validation.secrets import secret_of_job
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import traced

Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)

API_KEY = "tracking.api_key"
NOTE = "tracked"
"""Key of the note that holds the last step whose row was sent."""
LIMIT_S = 60.0
"""Time limit of one call of a tracker. A tracker that exceeds it is not used any more."""


class TrackerFailed(Exception):
    """A tracker raised an error."""


class TrackerHangs(Exception):
    """A call of a tracker did not return within `LIMIT_S`, and may never return."""


@dataclass(frozen=True)
class GuardedTracker:
    """A tracker whose `close` can neither delay the end of its job for long nor make it fail."""

    name: str
    tracker: trackers.Tracker

    def __str__(self) -> str:
        return self.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.log(step, values)

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        self.tracker.log_samples(step, samples)

    def close(self) -> None:
        try:
            _start_in_thread(self.tracker.close).result(LIMIT_S)
        except (TrackerFailed, TimeoutError) as error:
            log.warning("a tracker was not closed", tracker=self.name, error=str(error))


@traced(SpanKind.TRACK)
async def track(run: Run) -> None:
    """Sends the rows that were not sent yet, each with its step's samples. A tracker that fails or hangs loses these
    rows; the job continues."""
    if not run.spec.tracking.trackers:
        return
    if run.trackers is None:
        run.trackers = await _open_trackers(run)
    noted = await run.records.note(NOTE)
    sent = -1 if noted is None else noted
    # A row is sent once, so it waits for the evaluation of its step.
    last = run.job.step if run.evaluating is None else max(sent, run.evaluating.step - 1)
    rows = await run.records.rows(sent, last)
    samples = await run.records.samples_between(sent, last)
    for tracker in list(run.trackers):
        if not await _send(run, tracker, rows, samples):
            run.trackers.remove(tracker)
    await run.records.set_note(NOTE, last)


async def track_again(run: Run, version: Version) -> None:
    """Makes `track` send the rows of the steps after `version` again, because these steps are trained again."""
    sent = await run.records.note(NOTE)
    if sent is not None:
        await run.records.set_note(NOTE, min(sent, version))


async def _open_trackers(run: Run) -> list[trackers.Tracker]:
    names, reference, api_key = list(run.spec.tracking.trackers), run.spec.tracking.api_key, None
    try:
        api_key = None if reference is None else secret_of_job(reference, API_KEY)
    except InvalidJob as error:
        names.remove(trackers.WITH_KEY)
        await run.tell(events.TrackerFailed(tracker=trackers.WITH_KEY), f"{trackers.WITH_KEY} is not used: {error}")
    job = trackers.TrackedJob(
        job_id=run.job.id,
        name=run.job.name,
        project=run.spec.tracking.project,
        folder=Path(run.spec.output),
        spec=run.spec.model_dump(mode="json"),
        offline=run.spec.tracking.offline,
        api_key=api_key,
    )
    opened: list[trackers.Tracker] = []
    for name in names:
        try:
            (tracker,) = await _within_limit(partial(trackers.open_trackers, [name], job))
        except (TrackerFailed, TrackerHangs) as error:
            await run.tell(
                events.TrackerFailed(tracker=name), f"{name} is not used, because it could not be opened: {error}"
            )
        else:
            opened.append(GuardedTracker(name, tracker))
    return opened


async def _send(
    run: Run, tracker: trackers.Tracker, rows: Sequence[StepMetrics], samples: Sequence[SampleView]
) -> bool:
    """Sends `rows` and `samples`. Returns whether the tracker can still be used."""
    try:
        await _within_limit(partial(_log, tracker, rows, samples))
    except TrackerFailed as error:
        await run.tell(events.TrackerFailed(tracker=str(tracker)), f"{tracker} did not accept the metrics: {error}")
    except TrackerHangs as error:
        await run.tell(events.TrackerFailed(tracker=str(tracker)), f"{tracker} is not used any more: {error}")
        return False
    return True


def _log(tracker: trackers.Tracker, rows: Sequence[StepMetrics], samples: Sequence[SampleView]) -> None:
    for row in rows:
        tracker.log(row.step, row.values)
        if of_step := [sample for sample in samples if sample.step == row.step]:
            tracker.log_samples(row.step, of_step)


async def _within_limit(work: Callable[[], Answer]) -> Answer:
    """Runs `work` in a thread and returns its result. Raises TrackerFailed, TrackerHangs."""
    answer = asyncio.wrap_future(_start_in_thread(work))
    done, _ = await asyncio.wait({answer}, timeout=LIMIT_S)
    if not done:
        raise TrackerHangs(f"it did not answer within {LIMIT_S:g} s.")
    return answer.result()


def _start_in_thread(work: Callable[[], Answer]) -> "Future[Answer]":
    """Starts `work` in a daemon thread, so that the process can end even where the thread hangs."""
    answer: Future[Answer] = Future()
    answer.set_running_or_notify_cancel()

    def do() -> None:
        try:
            found = work()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            answer.set_exception(TrackerFailed(reason.encode(errors="backslashreplace").decode()))
        else:
            answer.set_result(found)

    threading.Thread(target=do, name="tracker", daemon=True).start()
    return answer
