"""Waits for a step's worth of groups: within the staleness bound, and with a signal where the job asks for one."""

import asyncio
from dataclasses import dataclass, field

from millrace import events
from millrace.drops import DropReason, without_signal
from millrace.errors import InvalidState
from millrace.ids import LeaseId, PromptId, Version
from millrace.spec.passes import compared_rewards
from millrace.spec.schedule import Schedule
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.observe.step_metrics import Fate
from services.coordinator.stages.batch import Batch
from services.coordinator.stages.feed import Arrived, Feed, streams
from services.coordinator.stages.issue import issue
from services.coordinator.stages.run import LOOK_EVERY_S, Run
from services.coordinator.stages.spans import traced
from services.coordinator.state.bell import waited
from services.coordinator.state.faults import Failures
from services.coordinator.state.group import GroupSummary

GATHER_S = 0.01
"""Answers that arrive within this time are looked at together."""
STALE = DropReason.TOO_STALE
STALE_ROUNDS = 8
"""A job fails when this many times a step's prompts became stale, without a step in between."""
REFUSALS_IN_A_ROW = 32
"""A job fails when this many prompts in a row, and at least twice a step's prompts, gave no group."""


@dataclass
class Gathered:
    """The complete groups that were looked at for this step."""

    admitted: dict[PromptId, GroupSummary] = field(default_factory=dict)
    stale: int = 0
    """Groups that came too late."""
    without_signal: int = 0
    last: int = 0
    """Number of the last group that was looked at, in the order of completion."""


@traced(SpanKind.ADMIT)
async def admit(run: Run) -> Batch:
    """The groups of the next step: of those that are complete, the ones that were issued first. The trainer gets parts
    of them meanwhile, where it can. Groups that came too late are generated again; groups without signal are dropped
    and replaced, where the job asks for it.

    Raises InvalidState if too many groups are rejected, Unavailable if no replica serves, Cancelled; and what the
    trainer raises for a part.
    """
    gathered = Gathered()
    async with Feed.of(run) as feed:
        while True:
            ring = run.components.queue.answered.next()
            await run.heed()
            unanswered = await _unanswered(run)
            await _look(run, gathered)
            await _check_failures(run)
            arrived = Arrived.of(gathered.admitted.values(), unanswered, run.spec.schedule.prompts_per_step)
            if batch := await feed.take(arrived):
                return batch
            await _check(run, gathered)
            await issue(run)
            await waited(ring, LOOK_EVERY_S)
            await asyncio.sleep(GATHER_S)


async def _look(run: Run, gathered: Gathered) -> None:
    """Admits, sends back or drops every complete group that was not looked at yet."""
    unseen, gathered.last = await run.prompts.generated(gathered.last)
    late: list[PromptId] = []
    equal: list[PromptId] = []
    compared = compared_rewards(run.spec)
    for summary in await run.prompts.summaries(unseen):
        if is_late(summary, run.job.version, run.spec.schedule):
            late.append(summary.prompt_id)
            run.lengths.add(summary, Fate.TOO_STALE)
        elif run.spec.algorithm.drop_groups_without_signal and without_signal(*summary.compared(compared)):
            equal.append(summary.prompt_id)
            run.lengths.add(summary, Fate.WITHOUT_SIGNAL)
        else:
            gathered.admitted[summary.prompt_id] = summary
            run.lengths.add(summary, Fate.KEPT)
    if late:
        step, drops = run.job.step + 1, run.spec.schedule.too_stale == "drop"
        regenerate = run.prompts.regenerate
        gathered.stale += await (run.prompts.drop(late, step, STALE) if drops else regenerate(late, step))
        then = "they are dropped" if drops else "their prompts are issued again"
        message = f"{len(late)} groups came too late for version {run.job.version}: {then}"
        await run.tell(events.GroupStale(prompts=late[:50]), message)
    if equal:
        reason = DropReason.NO_SIGNAL
        gathered.without_signal += await run.prompts.drop(equal, run.job.step + 1, reason)
        message = f"{len(equal)} groups dropped, as all rewards in each are equal"
        await run.tell(events.GroupDropped(reason=reason, prompts=equal[:50]), message)


async def _check_failures(run: Run) -> None:
    """Raises InvalidState if the reward or the environment failed on too many prompts."""
    limit, failures = run.spec.reward.max_failed_fraction, Failures.of(await run.prompts.view())
    if failures.exceed(limit, run.spec.schedule.prompts_per_step):
        what = f"reward or environment failed on {failures}, more than reward.max_failed_fraction: {limit:g}."
        fix = f"correct it, or raise reward.max_failed_fraction; `millrace show {run.job.id} --samples 4` has answers."
        raise InvalidState(f"{what} The last one: {await run.prompts.last_failure()}", fix)


async def _check(run: Run, gathered: Gathered) -> None:
    """Raises InvalidState or Unavailable if the job makes no progress."""
    await run.check_fleet(trainer_needed=True)
    per_step, algorithm = run.spec.schedule.prompts_per_step, run.spec.algorithm
    if gathered.without_signal > algorithm.max_refills * per_step:
        what = f"{gathered.without_signal} groups in a row had no signal: all rewards in each were equal."
        raise InvalidState(what, "make the task easier or harder, or raise algorithm.max_refills.")
    if gathered.stale > STALE_ROUNDS * per_step:
        what = f"{gathered.stale} groups for step {run.job.step + 1} were staler than schedule.max_staleness."
        raise InvalidState(what, "raise schedule.max_staleness, or lower schedule.prompts_per_step.")
    refusals = await run.prompts.refusals()
    if refusals.in_a_row >= max(REFUSALS_IN_A_ROW, 2 * per_step):
        await _check_failures(run)  # more may have failed since the last look, and their share is the better reason
        what = f"{refusals.in_a_row} prompts in a row produced no usable samples; the last one: {refusals.last}."
        raise InvalidState(
            what, f"fix the data or the reward function; `millrace show {run.job.id}` lists all reasons."
        )


def is_late(group: GroupSummary, version: Version, schedule: Schedule) -> bool:
    """Whether a group cannot be trained at the trainer's `version` any more."""
    staleness = group.staleness(version, schedule.staleness_of)
    return staleness < 0 or (staleness > schedule.max_staleness and schedule.too_stale != "train")


async def _unanswered(run: Run) -> list[LeaseId] | None:
    """The first leases without a group, as many as a step has prompts; None if the step does not depend on them."""
    schedule = run.spec.schedule
    needed = streams(run) or schedule.wait_for_slow
    return await run.prompts.unanswered(schedule.prompts_per_step) if needed else None
