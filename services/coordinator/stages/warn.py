"""Warns of training that goes wrong, once the steps show it."""

from pydantic_core import to_json

from millrace.events import TrainingWarning
from millrace.rest import StepMetrics, WarningCause, WarningView
from services.coordinator.observe import training_warnings
from services.coordinator.stages.run import Run
from services.coordinator.state.failures import TOLD_FROM, Failures

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
    failing = failures.share >= TOLD_FROM
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
