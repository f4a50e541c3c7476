"""Ends a job before its last step: it is solved, or it learns no more (`schedule.stop_when`)."""

from collections.abc import Mapping

from millrace import events
from millrace.spec.schedule import StopWhen
from services.coordinator.stages.run import Run


async def stop_early(run: Run) -> None:
    """Makes the step in which the job is the last one, where its rule is met: the job's loop then saves and evaluates
    as after any last step."""
    rule, step = run.spec.schedule.stop_when, run.job.step
    if rule is None or run.done or step == 0:
        return
    rows = await run.records.rows(max(0, step - 2 * (rule.flat_steps or 1)), step)
    why = reason(rule, {row.step: row.values[rule.metric] for row in rows if rule.metric in row.values}, step)
    if why is None:
        return
    await run.components.store.jobs.update(run.job.id, last_step=step, steps=step)
    event = events.JobStopping(step=step, metric=rule.metric, cause=why[0])
    await run.tell(event, f"stops after step {step} of {run.steps}: {why[1]} (schedule.stop_when)")
    await run.refresh()


def reason(rule: StopWhen, values: Mapping[int, float], step: int) -> tuple[events.StopCause, str] | None:
    """Why the job may stop after `step`, which has to have a value itself; `values` are by step."""
    if step not in values:
        return None
    if rule.solved_at is not None and values[step] >= rule.solved_at:
        return "solved", f"{rule.metric} is {values[step]:.4g}, at least {rule.solved_at:g}"
    if rule.flat_steps is None:
        return None
    last = [value for at, value in values.items() if at > step - rule.flat_steps]
    before = [value for at, value in values.items() if step - 2 * rule.flat_steps < at <= step - rule.flat_steps]
    if not before or step < 2 * rule.flat_steps or max(last) - max(before) > rule.flat_change:
        return None
    grown = f"its best value rose from {max(before):.4g} to {max(last):.4g}"
    return "flat", f"{rule.metric} is flat: over the last {rule.flat_steps} steps {grown}"
