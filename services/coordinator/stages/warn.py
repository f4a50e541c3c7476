"""Warns of training that goes wrong, once the steps show it."""

from pydantic_core import to_json

from millrace.rest import StepMetrics, WarningView
from services.coordinator.observe import training_warnings
from services.coordinator.stages.run import Run

KEPT = 50
"""Warnings that a job keeps, the newest."""


async def warn(run: Run, row: StepMetrics) -> None:
    """Adds an event for each trouble that the step with the metrics `row` makes certain, and marks in the job's record
    what is over."""
    lasting = training_warnings.lasting(row.values, run.spec)
    before = (await run.components.store.jobs.get(run.job.id)).warnings
    now = [w if w.cause in lasting else w.model_copy(update={"over": True}) for w in before]
    if lasting:
        rows = await run.records.rows(max(0, row.step - training_warnings.STEPS_LOOKED_AT), row.step)
        for told, message in training_warnings.found([each.values for each in rows], run.spec):
            await run.tell(told, message)
            now.append(WarningView(cause=told.cause, step=row.step, message=message))
    if now != before:
        await run.components.store.jobs.update(run.job.id, warnings_json=to_json(now[-KEPT:]).decode())
