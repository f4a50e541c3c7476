"""Gives the trainer groups of the next step while others are still generated (`trainer.streaming`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from millrace.ids import PromptId
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.stages.batch import Batch, Part, add, keep
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import stage_span
from services.coordinator.state.group import GroupSummary


@dataclass(frozen=True)
class Arrived:
    """The complete groups of a step in progress, in the order in which their prompts were issued.

    A step is trained on the first of them, as soon as there are enough. So its batch does not depend on parts that were
    trained before: these hold only groups among the step's first prompts in flight, complete or not, and no group that
    is completed later can come before those.
    """

    complete: Sequence[GroupSummary]
    first: Sequence[GroupSummary] = ()
    """The groups among as many prompts in flight as a step has, which were issued first."""

    @classmethod
    def of(cls, complete: Collection[GroupSummary], unanswered: Collection[str] | None, wanted: int) -> "Arrived":
        """`unanswered`: the first `wanted` leases without a group, in the order of issue, read before `complete` was,
        so that some of them may have a group now. None: not known, and no group is certain to be among the first."""
        ordered = sorted(complete, key=lambda group: _place(group.entry))
        if unanswered is None:
            return cls(ordered)
        waiting = set(unanswered) - {group.entry for group in ordered}
        places = sorted([*map(_place, waiting), *(_place(group.entry) for group in ordered)])[:wanted]
        return cls(ordered, [group for group in ordered if _place(group.entry) <= places[-1]])

    def last_part(self, given: Set[PromptId], wanted: int, *, wait_for_slow: bool) -> list[GroupSummary]:
        """The groups that complete the batch of `wanted` groups, of which the trainer was `given` some; empty where
        there are too few yet."""
        missing, due = wanted - len(given), self.first if wait_for_slow else self.complete
        new = [group for group in due if group.prompt_id not in given]
        return new[:missing] if len(new) >= missing else []

    def early_part(self, given: Set[PromptId]) -> list[GroupSummary]:
        """The groups that are certain to be in the batch, and that the trainer was not given yet."""
        return [group for group in self.first if group.prompt_id not in given]


LAST_SHARE = 0.25
"""If at most this share of a step's groups is missing, the trainer gets those that came without waiting for more."""


def is_due(early: Sequence[GroupSummary], missing: int, wanted: int, tokens: int) -> bool:
    """Whether the trainer gets these groups now. They have to hold `tokens`, a micro-batch for each rank, unless
    few of the `wanted` groups are missing: the engines empty then, and what waited for a full micro-batch would be
    trained after the longest answer."""
    if not early:
        return False
    return missing <= LAST_SHARE * wanted or sum(sum(group.lengths) for group in early) >= tokens


def _place(entry: str) -> tuple[int, int]:
    """Id of an entry of a Redis stream: milliseconds and a number. Groups of an earlier release, without one, are
    first."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds or 0), int(number or 0)


class Feed:
    """The batch of the next step, as it grows. The trainer gets a part of it whenever it is idle and `is_due` says so.
    The last part is left to the caller."""

    def __init__(self, run: Run, batch: Batch) -> None:
        self.batch = batch
        self._run = run
        self._began = time.monotonic()
        self._parts_allowed = streams(run)
        self._giving: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def of(cls, run: Run) -> AsyncIterator["Feed"]:
        """The feed of the step after the job's version. It begins with what an earlier process gave the trainer, which
        may or may not have it."""
        saved, step = await run.records.batch(), run.job.step + 1
        fits = saved is not None and len(saved.groups) < run.spec.schedule.prompts_per_step
        goes_on = saved is not None and saved.step == step and fits and streams(run)
        feed = cls(run, Batch.of(saved) if saved is not None and goes_on else Batch(step))
        if feed.batch.parts:
            feed._begin()
        try:
            yield feed
        finally:
            if feed._giving is not None:
                feed._giving.cancel()
                await asyncio.gather(feed._giving, return_exceptions=True)

    async def take(self, arrived: Arrived) -> Batch | None:
        """Looks at all groups that were admitted so far. The whole batch when they are there; None before. Raises what
        giving a part to the trainer raised."""
        self._check()
        schedule, given = self._run.spec.schedule, {group.prompt_id for group in self.batch.groups}
        wanted, waits = schedule.prompts_per_step, schedule.wait_for_slow
        if last := arrived.last_part(given, wanted, wait_for_slow=waits):
            if self._giving is not None:
                await self._giving
            self.batch.parts.append(Part(last))
            self.batch.waited_s = time.monotonic() - self._began - self.batch.trained_s
            return self.batch
        early = arrived.early_part(given)
        missing = wanted - len(given) - len(early)
        if self._giving is None and self._parts_allowed and is_due(early, missing, wanted, self._tokens):
            self.batch.parts.append(Part(early))
            await keep(self._run, self.batch, complete=False)
            self._begin()
        return None

    @property
    def _tokens(self) -> int:
        """Number of tokens that fill a micro-batch of each rank."""
        run = self._run
        return (run.job.token_budget or run.spec.trainer.token_budget) * run.microbatches_at_once

    def _begin(self) -> None:
        self._giving = asyncio.create_task(self._give())
        self._giving.add_done_callback(lambda _: self._run.components.queue.answered.ring())

    def _check(self) -> None:
        """Raises what the part that was given raised."""
        if self._giving is not None and self._giving.done():
            self._giving.result()
            self._giving = None

    async def _give(self) -> None:
        async with self._run.components.trainer.turn:
            began = time.monotonic()
            try:
                with stage_span(self._run, SpanKind.TRAIN):
                    await add(self._run, self.batch)
            finally:
                self.batch.trained_s += time.monotonic() - began


def streams(run: Run) -> bool:
    """Whether the trainer gets the groups of a step as they are completed."""
    return not run.job.whole_steps
