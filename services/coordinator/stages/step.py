"""One training step on one batch, and its entry in the ledger."""

import time

from pydantic_core import to_json

from millrace import events
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import MillraceError
from millrace.events import TrainingWarning
from millrace.rest import StepMetrics, WarningCause, WarningView
from millrace.telemetry.metrics.step.batch import STALE_TRAJECTORIES
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.coordinator.observe import histograms, series, training_warnings
from services.coordinator.observe.groups import samples_in
from services.coordinator.observe.step_metrics import batch_metrics, mean, milliseconds_per_token, step_row
from services.coordinator.stages.batch import Batch, finish, keep, shown
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import close_groups, traced
from services.coordinator.state.faults import REPORTED_FROM, Failures


async def interrupted(run: Run) -> Batch | None:
    """The batch of a step that was sent to the trainer and not marked as trained; None if there is none."""
    saved = await run.records.batch()
    if saved is None or not saved.complete or saved.step != run.job.step + 1:
        return None
    return Batch.of(saved)


@traced(SpanKind.TRAIN)
async def step(run: Run, batch: Batch) -> None:
    """Sends the trainer references to the groups that it does not have yet, and their lengths, then marks the batch as
    trained: metrics, samples and ledger at once."""
    await keep(run, batch, complete=True)
    trainer, started = run.components.trainer, time.monotonic()
    async with trainer.turn:
        trainer.holds = None
        answer = await finish(run, batch)
        if answer.version != batch.step:
            what = f"{trainer.member.id} answered step {batch.step} with version {answer.version}."
            raise MillraceError(what, "run the same release of millrace everywhere.")
        for part in batch.parts:
            close_groups(run, part.groups, part.begun_s)
        with span(SpanKind.MARK):
            await _mark(run, batch, answer, batch.trained_s + time.monotonic() - started)
            await run.refresh()
        trainer.holds = (run.job.id, run.job.version)


async def _mark(run: Run, batch: Batch, answer: trainer_pb2.StepResponse, seconds: float) -> None:
    reward = mean([r for g in batch.groups for r in g.rewards])
    values = batch_metrics(batch.groups, run.job.version, run.spec)
    values |= run.lengths.metrics(batch.groups)
    values[STALE_TRAJECTORIES] += (await run.records.row(batch.step - 1) or {}).get(STALE_TRAJECTORIES, 0.0)
    values |= {"timing_s/gen": batch.waited_s, "timing_s/train": seconds}
    values |= milliseconds_per_token({**answer.metrics, **values}, batch.groups)
    row = step_row(batch.step, values, trainer=answer.metrics)
    prompts = [g.prompt_id for g in batch.groups]
    samples = await _samples(run, batch, answer)
    kept = run.spec.tracking.samples_kept
    drawn = histograms.to_json(histograms.of_groups(batch.groups, run.job.version) | histograms.of_trainer(answer))
    if not await run.prompts.train(prompts, batch.step, reward, row.model_dump_json(), samples, kept, drawn):
        return
    staleness = [run.job.version - oldest for g in batch.groups for oldest in g.oldest]
    run.components.prometheus.trained(run.job.id, staleness)
    message = f"step {batch.step} of {run.steps}: reward {reward:.4g}"
    await run.tell(events.StepDone(step=batch.step, reward=reward, seconds=seconds), message)
    await series.keep(run.records, batch.step)
    await warn(run, row)


async def _samples(run: Run, batch: Batch, answer: trainer_pb2.StepResponse) -> list[str]:
    told = {group.prompt_id: group for group in answer.shown}
    found = await samples_in(run.prompts, run.records, shown(run, batch), batch.step, told)
    return [sample.model_dump_json() for sample in found]


FAILED_METRIC = "reward_failed"
"""What the warning of failures names in place of a step metric: the reason in the ledger."""
KEPT = 50
"""Warnings that a job keeps, the newest."""


OF_FAILURES = {WarningCause.EQUAL_REWARDS, WarningCause.NO_SIGNAL}
"""Not told while the reward fails on a part of the prompts: what is left says little about the task."""


async def warn(run: Run, row: StepMetrics) -> None:
    """Adds an event for each trouble that the step with the metrics `row` makes certain, and marks in the job's record
    what is over."""
    failures = Failures.of(await run.prompts.view())
    failing = failures.share >= REPORTED_FROM
    lasting = training_warnings.lasting(row.values, run.spec) - (OF_FAILURES if failing else set())
    if failing:
        lasting.add(WarningCause.REWARD_FAILURES)
    before = (await run.components.store.jobs.get(run.job.id)).warnings
    now = [w if w.cause in lasting else w.model_copy(update={"over": True}) for w in before]
    if lasting:
        rows = await run.records.rows(max(0, row.step - training_warnings.STEPS_LOOKED_AT), row.step)
        due = training_warnings.found([each.values for each in rows], run.spec)
        due = [(told, message) for told, message in due if told.cause in lasting]
        if failing:
            told, message = await _failure_warning(run, failures)
            now = [w.model_copy(update={"message": message}) if _is_current(w, told.cause) else w for w in now]
            if not any(_is_current(w, told.cause) for w in now):
                due.append((told, message))
        for told, message in due:
            await run.tell(told, message)
            now.append(WarningView(cause=told.cause, step=row.step, message=message))
    if now != before:
        await run.components.store.jobs.update(run.job.id, warnings_json=to_json(now[-KEPT:]).decode())


def _is_current(warning: WarningView, cause: WarningCause) -> bool:
    return warning.cause is cause and not warning.over


async def _failure_warning(run: Run, failures: Failures) -> tuple[TrainingWarning, str]:
    """The warning that a part of the prompts is dropped, with the exception and its line."""
    told = TrainingWarning(
        cause=WarningCause.REWARD_FAILURES,
        metric=FAILED_METRIC,
        value=failures.share,
        limit=run.spec.reward.max_failed_fraction,
        steps=1,
    )
    last = await run.prompts.last_failure()
    return told, f"reward or environment failed on {failures}, which were dropped. The last one: {last}"
