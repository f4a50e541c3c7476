"""Scores versions on held-out prompts, beside training.

Every answer of an evaluation is of one version, from its first token to its last. So replicas hold that version until
all answers are there: the trainer takes its next step meanwhile, and only the publication of that step waits. The
prompts are issued, and leased, before those to be trained. The first step waits too: its groups come after those
answers anyway, and while the trainer has its version, no replica's death costs the score before training.

If every replica that held the version is gone after that step, nobody can give its answers. Then the next version is
evaluated instead.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import asdict

from millrace import events
from millrace.contracts.v1 import work_pb2
from millrace.data import PromptSource
from millrace.ids import JobId, Purpose, Version, evaluation_prompt
from millrace.spec.schedule import HELD_OUT, OF_EVALUATIONS
from millrace.telemetry.metrics.step.evaluation import ASKED_PROMPTS, SCORED_PROMPTS
from millrace.telemetry.metrics.step.timing import TESTING, TESTING_WAIT
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.observe import series
from services.coordinator.observe.groups import samples_in
from services.coordinator.observe.step_metrics import held_out, main_values, mean
from services.coordinator.stages.issue import AT_ONCE, draft, first_of
from services.coordinator.stages.run import EVALUATING, LOOK_EVERY_S, Evaluating, Run
from services.coordinator.stages.spans import close_groups, stage_span, step_of
from services.coordinator.state.bell import waited
from services.coordinator.state.group import GroupSummary
from services.coordinator.state.lease import Draft
from services.coordinator.state.member import Weights


async def recall_evaluation(run: Run) -> None:
    """Finds out which evaluation an earlier process, or life of the loop, has begun."""
    note = await run.records.note(EVALUATING)
    begun = Evaluating(**note) if note and "began_s" in note else None
    run.evaluating = begun if begun and begun.lineage == run.job.lineage else None


async def begin_evaluation(run: Run) -> None:
    """Issues the prompts of an evaluation of the current version, if that is due at this step and has no result yet."""
    wanted, step = run.spec.evaluation, run.job.step
    if wanted is None or run.evaluation_source is None or run.evaluating is not None:
        return
    owed = await run.records.note(EVALUATING)
    instead_of = owed["lost"] if owed and owed.get("lineage") == run.job.lineage else -1
    due = step == 0 or run.done or (wanted.every_steps > 0 and step % wanted.every_steps == 0) or instead_of >= 0
    if not due or TESTING in (await run.records.row(step) or {}):
        return
    await run.evaluation.forget()
    begun = Evaluating(run.job.lineage, run.job.version, step, time.time(), instead_of)
    await run.records.set_note(EVALUATING, asdict(begun))
    run.evaluating = begun
    await run.refresh()  # replicas lease its prompts from here on
    await _issue(run, begun)


async def evaluate(run: Run) -> None:
    """Waits for the evaluation in progress where the end of the job depends on it. Raises Unavailable if no replica
    serves, TrainerLost, Cancelled."""
    rule = run.spec.schedule.stop_when
    if run.done or (rule is not None and rule.metric.startswith(OF_EVALUATIONS)):
        await _finish(run, step_of(run, SpanKind.EVALUATE))


async def evaluated_before(run: Run, stage: SpanKind) -> None:
    """Called before a publication or a step. Records the evaluation in progress if all of its answers are there; waits
    for them if the stage would make its version, or this one's last holder, go away. Raises as `evaluate`."""
    if (begun := run.evaluating) is None:
        return
    goes = begun.version != run.job.version if stage is SpanKind.PUBLISH else begun.step == 0
    if goes or await _answered(run):
        await _finish(run, step_of(run, stage))


async def _finish(run: Run, within: int) -> None:
    """Waits for the answers in the time of the step `within`, and records what they tell."""
    if (begun := run.evaluating) is None:
        return
    began = time.monotonic()
    with stage_span(run, SpanKind.EVALUATE, within):
        groups = await _answers(run, begun)
        waited_s = time.monotonic() - began
        if groups is None:
            await run.forget_evaluation()
            await run.records.set_note(EVALUATING, {"lineage": begun.lineage, "lost": begun.version})
        else:
            await _record(run, begun, groups, waited_s)
            close_groups(run, groups, time.time(), within)
            await run.forget_evaluation()
        await run.refresh()


def _count(run: Run) -> int:
    """Number of prompts of an evaluation."""
    assert run.spec.evaluation is not None and run.evaluation_source is not None
    return min(run.spec.evaluation.prompts, len(run.evaluation_source))


async def _issue(run: Run, begun: Evaluating) -> None:
    """Issues the evaluation's prompts. Those that were issued before stay as they are."""
    source, wanted, count = run.evaluation_source, run.spec.evaluation, _count(run)
    assert source is not None and wanted is not None
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
        drafts = await asyncio.to_thread(_drafts, run.job.id, source, rows, begun.version, sampling)
        await run.evaluation.issue(drafts, begun.step + 1)
        start += len(drafts)
        run.components.queue.issued.ring()
        await run.heed(may_pause=begun.version == run.job.version)


def _drafts(
    job_id: JobId, source: PromptSource, rows: range, version: Version, sampling: work_pb2.Sampling
) -> list[Draft]:
    prompts = (evaluation_prompt(version, row) for row in rows)
    return first_of(draft(job_id, source, prompt_id, Purpose.EVALUATION, sampling) for prompt_id in prompts)


async def _answered(run: Run) -> bool:
    """Whether every prompt was answered."""
    counts = await run.evaluation.counts()
    return counts.generated + counts.dropped >= _count(run)


async def _answers(run: Run, begun: Evaluating) -> list[GroupSummary] | None:
    """The summaries of the groups, as soon as every prompt was answered; None if there is nobody left who could. A job
    is not paused while replicas wait for the trainer's version."""
    while True:
        ring = run.components.queue.answered.next()
        await run.heed(may_pause=begun.version == run.job.version)
        if await _answered(run):
            return await run.evaluation.summaries((await run.evaluation.generated())[0])
        if (await run.evaluation.counts()).issued < _count(run):  # a process ended while it issued them
            await _issue(run, begun)
        if begun.version != run.job.version and not _held(run, begun):
            return None
        await run.check_fleet(trainer_needed=not _held(run, begun))
        await waited(ring, LOOK_EVERY_S)


def _held(run: Run, begun: Evaluating) -> bool:
    """Whether a replica holds the version that is evaluated."""
    wanted = Weights(run.job.id, begun.lineage, begun.version)
    return any(member.holds(wanted) for member in run.components.fleet.ready_for(run.job.id))


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


async def _record(run: Run, begun: Evaluating, groups: list[GroupSummary], waited_s: float) -> None:
    count, step = _count(run), begun.step
    ended_s = max((group.completed_s for group in groups if group.completed_s), default=time.time())
    values = await asyncio.to_thread(_metrics, groups)
    values |= {SCORED_PROMPTS: float(len(groups)), ASKED_PROMPTS: float(count)}
    values |= {TESTING: max(0.0, ended_s - begun.began_s), TESTING_WAIT: waited_s}
    shown = [group.prompt_id for group in groups[: run.spec.tracking.samples_per_step]]
    await run.records.add_samples(await samples_in(run.evaluation, run.records, shown, step))
    score = values.get(HELD_OUT)
    found = _fields("evaluation_before", score, len(groups), count) if step == 0 else {}
    if step > 0 or run.done:
        found |= _fields("evaluation_last", score, len(groups), count) | {"evaluation_step": step}
    await run.components.store.jobs.update(run.job.id, **found)
    message = f"none of the {count} held-out prompts could be scored"
    if score is not None:
        message = f"held-out {score:.4g} at version {begun.version} on {len(groups)} of {count} prompts"
    if begun.instead_of >= 0:
        message += f", instead of version {begun.instead_of}, which no replica had any more"
    if len(groups) < count:
        message += f"; the last one without a score: {(await run.evaluation.refusals()).last}"
    await run.add_to_row(values, step)
    await series.make_again(run.records, step, run.job.step)
    await run.tell(events.EvaluationDone(step=step, version=begun.version, metrics=values), message)
