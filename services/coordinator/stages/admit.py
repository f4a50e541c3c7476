"""Waits for a step's worth of groups: within the staleness bound, and with a signal where the job asks for one."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from millrace.batching.filters import signal
from millrace.errors import InvalidState
from millrace.ids import PromptId
from services.coordinator.bell import waited
from services.coordinator.groups import Summary
from services.coordinator.run import LOOK_EVERY_S, Run
from services.coordinator.spans import traced
from services.coordinator.stages.issue import issue

GATHER_S = 0.01
"""Answers that come so close together are looked at together."""
STALE_ROUNDS = 8
"""A job whose groups go stale for so many times a step's prompts in a row fails."""
REFUSALS_IN_A_ROW = 32
"""A job whose replicas answer so often in a row, and twice a step's prompts, that there is no group fails."""


@dataclass(frozen=True)
class Batch:
    """What a step is trained on."""

    step: int
    groups: list[Summary]
    waited_s: float


@traced
async def admit(run: Run) -> Batch:
    """The first groups to be complete. Those that are too stale or without signal are dropped and replaced.

    Raises InvalidState where that goes on for too long, Unavailable where no replica serves, Cancelled.
    """
    started, wanted = time.monotonic(), run.spec.schedule.prompts_per_step
    admitted: dict[PromptId, Summary] = {}
    dropped: Counter[str] = Counter()
    while True:
        ring = run.parts.queue.answered.next()
        await run.heed()
        await _look(run, admitted, dropped)
        if len(admitted) >= wanted:
            groups = list(admitted.values())[:wanted]
            return Batch(run.job.step + 1, groups, time.monotonic() - started)
        await _check(run, dropped)
        await issue(run)
        await waited(ring, LOOK_EVERY_S)
        await asyncio.sleep(GATHER_S)


async def _look(run: Run, admitted: dict[PromptId, Summary], dropped: Counter[str]) -> None:
    """Admits or drops every group that was not looked at yet."""
    unseen = [p for p in await run.prompts.generated() if p not in admitted]
    refused: dict[str, list[PromptId]] = {}
    for summary in await run.prompts.summaries(unseen):
        if reason := _refusal(run, summary):
            refused.setdefault(reason, []).append(summary.prompt_id)
        else:
            admitted[summary.prompt_id] = summary
    for reason, prompts in refused.items():
        dropped[reason] += await run.prompts.drop(prompts, run.job.step + 1, reason)
        message = f"{len(prompts)} groups dropped: {reason}"
        await run.tell("group.dropped", message, reason=reason, prompts=prompts[:50])


def _refusal(run: Run, summary: Summary) -> str:
    """Why the group is not trained, as the ledger keeps it; empty where it is."""
    staleness = summary.staleness(run.job.version)
    if staleness < 0:
        return "made by a version that is gone"
    if staleness > run.spec.schedule.max_staleness:
        return "stale"
    if run.spec.algorithm.drop_groups_without_signal and not (verdict := signal(summary.rewards)).keep:
        return verdict.reason.partition(":")[0]
    return ""


async def _check(run: Run, dropped: Counter[str]) -> None:
    """Raises where the job gets nowhere."""
    run.check_replicas()
    per_step, algorithm = run.spec.schedule.prompts_per_step, run.spec.algorithm
    without_signal = sum(count for reason, count in dropped.items() if reason.startswith("no signal"))
    if algorithm.drop_groups_without_signal and without_signal > algorithm.max_refills * per_step:
        what = f"{without_signal} groups in a row had no signal: all rewards in each were equal."
        raise InvalidState(what, "make the task easier or harder, or raise algorithm.max_refills.")
    if dropped["stale"] > STALE_ROUNDS * per_step:
        what = f"{dropped['stale']} groups for step {run.job.step + 1} were staler than schedule.max_staleness."
        raise InvalidState(what, "raise schedule.max_staleness, or lower schedule.prompts_per_step.")
    refusals = await run.prompts.refusals()
    if refusals.in_a_row >= max(REFUSALS_IN_A_ROW, 2 * per_step):
        what = f"{refusals.in_a_row} prompts in a row brought no group; the last one: {refusals.last}."
        raise InvalidState(what, "mend the data or the reward function; GET /v1/jobs/{id}/ledger has all reasons.")
