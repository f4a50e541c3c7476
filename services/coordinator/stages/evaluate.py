"""Scores the current version on held-out prompts."""

import asyncio
import time
from collections import defaultdict

from millrace import events
from millrace.contracts.v1 import work_pb2
from millrace.data import PromptSource
from millrace.ids import JobId, Purpose, Version, evaluation_prompt
from millrace.spec.model import Evaluation
from millrace.spec.schedule import HELD_OUT
from millrace.telemetry.metrics.step.evaluation import ASKED_PROMPTS, SCORED_PROMPTS
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.observe.evaluation import held_out, main_values
from services.coordinator.observe.samples import samples_in
from services.coordinator.observe.step_metrics import mean
from services.coordinator.stages.issue import AT_ONCE, draft, first_of
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.stages.spans import close_groups, traced
from services.coordinator.state.bell import waited
from services.coordinator.state.group import GroupSummary
from services.coordinator.state.lease import Draft

NOTE = "evaluation"
"""Names the note that says which evaluation is in progress."""


@traced(SpanKind.EVALUATE)
async def evaluate(run: Run) -> None:
    """Evaluates the current version, if that is due at this step and has no result yet. Raises Unavailable if no
    replica serves, TrainerLost, Cancelled."""
    wanted, source, step = run.spec.evaluation, run.evaluation_source, run.job.step
    if wanted is None or source is None:
        return
    due = step == 0 or run.done or (wanted.every_steps > 0 and step % wanted.every_steps == 0)
    if not due or "timing_s/testing" in (await run.records.row(step) or {}):
        return
    started = time.monotonic()
    identity = f"{run.job.lineage}.{run.job.version}"
    if await run.records.note(NOTE) != identity:
        await run.evaluation.forget()
        await run.records.set_note(NOTE, identity)
    count = min(wanted.prompts, len(source))
    await _issue(run, wanted, count)
    groups = await _answers(run, count)
    await _record(run, groups, count, time.monotonic() - started)
    close_groups(run, groups, time.time())
    await run.evaluation.forget()


async def _issue(run: Run, wanted: Evaluation, count: int) -> None:
    """Issues the evaluation's prompts. Those that were issued before stay as they are."""
    source, version = run.evaluation_source, run.job.version
    assert source is not None
    sampling = work_pb2.Sampling(
        samples=wanted.samples_per_prompt,
        max_response_tokens=run.spec.rollout.max_response_tokens,
        temperature=wanted.temperature,
        top_p=1.0,
        stop=run.spec.rollout.stop,
    )
    start = 0
    while start < count:
        rows = range(start, min(start + AT_ONCE, count))
        drafts = await asyncio.to_thread(_drafts, run.job.id, source, rows, version, sampling)
        await run.evaluation.issue(drafts, run.job.step + 1)
        start += len(drafts)
        run.components.queue.issued.ring()
        await run.heed()


def _drafts(
    job_id: JobId, source: PromptSource, rows: range, version: Version, sampling: work_pb2.Sampling
) -> list[Draft]:
    prompts = (evaluation_prompt(version, row) for row in rows)
    return first_of(draft(job_id, source, prompt_id, Purpose.EVALUATION, sampling) for prompt_id in prompts)


async def _answers(run: Run, count: int) -> list[GroupSummary]:
    """The summaries of the groups, as soon as every prompt was answered."""
    while True:
        ring = run.components.queue.answered.next()
        await run.heed()
        counts = await run.evaluation.counts()
        if counts.generated + counts.dropped >= count:
            return await run.evaluation.summaries((await run.evaluation.generated())[0])
        await run.check_fleet()
        await waited(ring, LOOK_EVERY_S)


def _metrics(groups: list[GroupSummary]) -> dict[str, float]:
    """The metrics of every data source, and the held-out score if a prompt was scored. The draws of majorities may
    take seconds."""
    by_source: defaultdict[str, list[GroupSummary]] = defaultdict(list)
    for group in groups:
        by_source[group.data_source].append(group)
    values = {name: value for source, own in by_source.items() for name, value in held_out(source, own).items()}
    answers = [value for own in by_source.values() for value in main_values(own)]
    return values | ({HELD_OUT: mean(answers)} if answers else {})


def _fields(name: str, score: float | None, scored: int, asked: int) -> dict[str, float | str]:
    """The fields of the job's record for one evaluation. A score that is not known is empty there."""
    return {name: "" if score is None else score, f"{name}_scored": scored, f"{name}_asked": asked}


async def _record(run: Run, groups: list[GroupSummary], count: int, seconds: float) -> None:
    values = await asyncio.to_thread(_metrics, groups)
    values |= {SCORED_PROMPTS: float(len(groups)), ASKED_PROMPTS: float(count), "timing_s/testing": seconds}
    shown = [group.prompt_id for group in groups[: run.spec.tracking.samples_per_step]]
    await run.records.add_samples(await samples_in(run.evaluation, run.records, shown, run.job.step))
    score = values.get(HELD_OUT)
    found = _fields("evaluation_before", score, len(groups), count) if run.job.step == 0 else {}
    if run.job.step > 0 or run.done:
        found |= _fields("evaluation_last", score, len(groups), count) | {"evaluation_step": run.job.step}
    await run.components.store.jobs.update(run.job.id, **found)
    message = f"none of the {count} held-out prompts could be scored"
    if score is not None:
        message = f"held-out {score:.4g} at version {run.job.version} on {len(groups)} of {count} prompts"
    if len(groups) < count:
        message += f"; the last one without a score: {(await run.evaluation.refusals()).last}"
    await run.add_to_row(values)
    await run.tell(events.EvaluationDone(step=run.job.step, version=run.job.version, metrics=values), message)
    await run.refresh()
