"""Gives the trainer groups of the next step while others are still generated (`trainer.streaming`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from millrace.ids import PromptId
from millrace.spec.passes import needs_whole_batch
from millrace.telemetry.spans.kinds import SpanKind
from services.coordinator.stages.batch import Batch, Part, add, keep
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import stage_span
from services.coordinator.state.group import GroupSummary


class Feed:
    """The batch of the next step, as it grows. The trainer gets a part of it whenever it is idle and the new groups
    have a micro-batch for each of its ranks; the last part is left to the caller."""

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
        goes_on = saved is not None and saved.step == step and streams(run)
        feed = cls(run, Batch.of(saved) if saved is not None and goes_on else Batch(step))
        if feed.batch.parts:
            feed._begin()
        try:
            yield feed
        finally:
            if feed._giving is not None:
                feed._giving.cancel()
                await asyncio.gather(feed._giving, return_exceptions=True)

    async def take(self, admitted: Mapping[PromptId, GroupSummary], wanted: int) -> Batch | None:
        """Looks at all groups that were admitted so far, of which a step needs as many as `wanted`. The whole batch
        when they are there, the stalest first; None before. Raises what giving a part to the trainer raised."""
        self._check()
        given = {group.prompt_id for group in self.batch.groups}
        new = sorted((each for each in admitted.values() if each.prompt_id not in given), key=lambda s: min(s.oldest))
        missing = wanted - len(given)
        if len(new) >= missing:
            if self._giving is not None:
                await self._giving
            self.batch.parts.append(Part(new[:missing]))
            self.batch.waited_s = time.monotonic() - self._began - self.batch.trained_s
            return self.batch
        if self._giving is None and self._parts_allowed and self._fills_all_ranks(new):
            self.batch.parts.append(Part(new))
            await keep(self._run, self.batch, complete=False)
            self._begin()
        return None

    def _fills_all_ranks(self, groups: list[GroupSummary]) -> bool:
        run = self._run
        budget = run.job.token_budget or run.spec.trainer.token_budget
        return sum(sum(group.lengths) for group in groups) >= budget * run.microbatches_at_once

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
    """Whether the trainer gets the groups of a step as they come: the job asks for it, nothing in it needs the whole
    batch first, and the trainer knows parts."""
    return run.spec.trainer.streaming and run.microbatches_at_once > 0 and not needs_whole_batch(run.spec)
