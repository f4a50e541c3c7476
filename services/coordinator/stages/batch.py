"""The batch of a step: its groups, in the parts in which the trainer gets them."""

import time
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

from millrace import events
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import OutOfMemory
from millrace.ids import PromptId
from services.coordinator.fleet.partition import TrainerLost
from services.coordinator.stages.configure import holds_job
from services.coordinator.stages.run import Run
from services.coordinator.state.group import GroupSummary
from services.coordinator.store.records import StoredBatch


@dataclass
class Part:
    """Groups that the trainer gets at once."""

    groups: list[GroupSummary]
    begun_s: float = 0.0
    """Unix time at which they were sent to it; 0: not yet."""


@dataclass
class Batch:
    """The groups that a step is trained on, so far."""

    step: int
    parts: list[Part] = field(default_factory=list)
    """The last part of a batch that is complete ends the step."""
    waited_s: float = 0.0
    """How long the trainer waited for groups."""
    trained_s: float = 0.0
    """How long it took for the parts before the last."""
    given: int = 0
    """Parts that the trainer certainly has."""
    token_budget: int = 0
    """Tokens in a micro-batch of those parts."""

    @classmethod
    def of(cls, saved: StoredBatch) -> Self:
        """The batch as it was kept. What the trainer has of it is not known."""
        ends = list(accumulate(saved.sizes))
        parts = [Part(saved.groups[end - size : end]) for size, end in zip(saved.sizes, ends, strict=True)]
        return cls(saved.step, parts, saved.waited_s)

    @property
    def groups(self) -> list[GroupSummary]:
        """All groups, in order."""
        return [group for part in self.parts for group in part.groups]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((tokens for group in self.groups for tokens in group.lengths), default=0)

    def begin_anew(self) -> None:
        """The trainer gets all groups again, in one part."""
        self.parts, self.given = [Part(self.groups)], 0


async def keep(run: Run, batch: Batch, *, complete: bool) -> None:
    """Keeps the batch until the step is marked as trained: after a crash the same groups are sent again."""
    sizes = [len(part.groups) for part in batch.parts]
    await run.records.set_batch(StoredBatch(batch.step, batch.groups, batch.waited_s, sizes, complete))


async def add(run: Run, batch: Batch) -> None:
    """Gives the trainer the parts of an incomplete batch that it does not have. Raises as `finish`."""
    await _made(run, batch, ends=False)


async def finish(run: Run, batch: Batch) -> trainer_pb2.StepResponse:
    """Gives the trainer the parts that it does not have, of which the last ends the step; its answer.

    Where a rank has no memory left and the job says so, the step is made again in one part with half the token budget.
    Raises OutOfMemory if that is not possible, and TrainerLost if the trainer had to give up what it holds: the
    budget is smaller when the step comes again.
    """
    answer = await _made(run, batch, ends=True)
    assert answer is not None
    return answer


async def _made(run: Run, batch: Batch, *, ends: bool) -> trainer_pb2.StepResponse | None:
    while True:
        budget = _token_budget(run, batch)
        if batch.given and budget != batch.token_budget:
            batch.begin_anew()
        batch.token_budget = budget
        try:
            return await _give(run, batch, ends=ends)
        except OutOfMemory as error:
            batch.begin_anew()
            await _lower_budget(run, batch, error)
        if not await holds_job(run, await run.components.trainer.status()):
            raise TrainerLost("the trainer ran out of memory and gave its weights up.")


async def _give(run: Run, batch: Batch, *, ends: bool) -> trainer_pb2.StepResponse | None:
    trainer, last = run.components.trainer, len(batch.parts) - 1
    for number in range(batch.given, len(batch.parts)):
        request = _request(run, batch, number, len(batch.groups) if ends else run.spec.schedule.prompts_per_step)
        batch.parts[number].begun_s = batch.parts[number].begun_s or time.time()
        if ends and number == last:
            return await trainer.call(TrainerRpc.Step, request)
        await trainer.call(TrainerRpc.AddPart, trainer_pb2.AddPartRequest(part=request))
        batch.given = number + 1
    return None


async def _lower_budget(run: Run, batch: Batch, error: OutOfMemory) -> None:
    """Stores half of the token budget with the job, or the length of the batch's longest sequence where that is more.
    Raises `error` where the job does not ask for that, or where the budget was no larger."""
    if run.spec.trainer.on_out_of_memory != "halve_budget":
        raise error
    before, longest = _token_budget(run, batch), batch.longest
    lowered = max(before // 2, longest)
    if lowered >= before:
        why = f"The token budget of {before:,} cannot be lowered: the longest sequence has {longest:,} tokens."
        what = f"{error.what} {why}"
        raise OutOfMemory(what, error.fix) from error
    await run.components.store.jobs.update(run.job.id, token_budget=lowered)
    run.job = replace(run.job, token_budget=lowered)
    told = events.TrainerOutOfMemory(step=batch.step, token_budget_before=before, token_budget=lowered)
    await run.tell(told, f"{error.what} Step {batch.step} is made again with a token budget of {lowered:,}.")


def _token_budget(run: Run, batch: Batch) -> int:
    """Tokens in a micro-batch: the spec's, or fewer since the trainer ran out of memory. A batch with a sequence of
    more tokens than those gets a budget of that many: the spec allows such a sequence."""
    allowed = run.spec.trainer.token_budget
    return min(allowed, max(run.job.token_budget or allowed, batch.longest))


def _request(run: Run, batch: Batch, number: int, groups: int) -> trainer_pb2.StepRequest:
    """The request for a part of a step of so many groups."""
    kept = set(shown(run, batch))
    return trainer_pb2.StepRequest(
        job_id=run.job.id,
        step=batch.step,
        groups=[group_ref(group, shown=group.prompt_id in kept) for group in batch.parts[number].groups],
        work_address=run.components.work_address,
        token_budget=batch.token_budget if run.job.token_budget else 0,
        part=number,
        step_groups=groups,
    )


def shown(run: Run, batch: Batch) -> list[PromptId]:
    """Prompts of the batch whose samples are kept for people."""
    return [group.prompt_id for group in batch.groups[: run.spec.tracking.samples_per_step]]


def group_ref(group: GroupSummary, shown: bool = False) -> trainer_pb2.GroupRef:
    """The group as a step names it. `shown`: its samples are kept for people."""
    ref = trainer_pb2.GroupRef(prompt_id=group.prompt_id, prompt_tokens=group.prompt_tokens, shown=shown)
    if group.shapes is None:
        ref.response_tokens.extend(group.response_tokens)
        return ref
    for shape, tokens in zip(group.shapes, group.response_tokens, strict=True):
        ref.trajectories.add(
            prompt_tokens=shape.prompt_tokens,
            response_tokens=tokens,
            sampled_tokens=shape.sampled_tokens,
            episode=shape.episode,
        )
    return ref
