"""Puts prompts into the queue, as many as the staleness bound allows."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from millrace import events
from millrace.admission.choices import needs_greedy_baseline
from millrace.contracts.v1 import work_pb2
from millrace.data import PromptRow, PromptSource
from millrace.data.row import json_texts
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow, MillraceError
from millrace.ids import JobId, PromptId, Purpose, row_of, training_prompt
from millrace.spec.job import JobSpec
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.wire.enums import PURPOSE_NUMBERS
from services.coordinator.stages.run import Run
from services.coordinator.stages.spans import stage_span
from services.coordinator.state.lease import Draft, DroppedPrompt, QueuedPrompt
from services.coordinator.state.ledger import capacity

AT_ONCE = 256
"""Most prompts that one command issues."""
MOST_BYTES = 64 << 20
"""A command issues no more prompts once it has so many bytes of them, as images have. Redis ends a connection with
1 GiB unread."""


async def issue(run: Run) -> None:
    """Issues as many prompts as the capacity allows: first those to be issued again, then the next of the data.

    A cancel or a pause is heeded between two commands. Raises Superseded, Cancelled.
    """
    schedule = run.spec.schedule
    counts = await run.prompts.counts()
    # Complete groups that wait keep no engine busy, and would become too stale: unless they wait for slower ones.
    waiting = 0 if schedule.wait_for_slow else counts.generated
    room = capacity(
        staleness=schedule.max_staleness,
        version=run.job.version,
        prompts_per_step=schedule.prompts_per_step,
        trained=counts.trained,
        in_flight=counts.in_flight,
        carried=max(0, schedule.carried_prompts - waiting),
    )
    still_needed = run.steps * schedule.prompts_per_step - counts.trained - counts.in_flight
    room = min(room, still_needed)
    if room <= 0:
        return
    with stage_span(run, SpanKind.ISSUE):
        while room > 0:
            room -= await _issue_some(run, min(room, AT_ONCE))
            run.components.queue.issued.ring()
            if room > 0:
                await run.heed()


async def _issue_some(run: Run, count: int) -> int:
    if prompts := await run.prompts.waiting(count):
        drafts = await asyncio.to_thread(_drafts, run, prompts)
        await run.prompts.reissue(drafts, run.job.step + 1)
    else:
        drafts = await asyncio.to_thread(_draw, run, count)
        cursor = run.job.cursor, run.job.cursor + len(drafts)
        moved = await run.prompts.issue(drafts, run.job.step + 1, cursor)
        await run.refresh()
        if not moved:
            # A call whose answer was lost is repeated, so this one may itself have moved the cursor before.
            await run.components.store.leadership.still_ours()
            if run.job.cursor != cursor[1]:
                what = f"the data cursor of {run.job.id} is not at {cursor[0]}: another coordinator works on this job."
                raise MillraceError(what, "run one coordinator on one Redis.")
    for bad in (draft for draft in drafts if isinstance(draft, DroppedPrompt)):
        await run.tell(events.PromptDropped(reason=bad.drop.reason, prompt=bad.prompt_id), str(bad.drop))
    return len(drafts)


def _draw(run: Run, count: int) -> list[Draft]:
    """The next prompts of the data, at most up to the end of the pass."""
    turn, place = divmod(run.job.cursor, len(run.source))
    return _drafts(run, [training_prompt(turn, row) for row in run.order(turn)[place : place + count]])


def _drafts(run: Run, prompts: Sequence[PromptId]) -> list[Draft]:
    sampling = training_sampling(run.spec)
    return first_of(draft(run.job.id, run.source, prompt_id, Purpose.TRAIN, sampling) for prompt_id in prompts)


def first_of(drafts: Iterable[Draft]) -> list[Draft]:
    """The first of the drafts, as many as one command may issue; at least one."""
    found, size = list[Draft](), 0
    for each in drafts:
        found.append(each)
        size += each.lease.ByteSize() if isinstance(each, QueuedPrompt) else 0
        if size > MOST_BYTES:
            break
    return found


def training_sampling(spec: JobSpec) -> work_pb2.Sampling:
    """How replicas sample the prompts of the training data."""
    rollout = spec.rollout
    return work_pb2.Sampling(
        samples=rollout.samples_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        greedy_baseline=needs_greedy_baseline(spec),
        min_samples=rollout.min_samples or 0,
    )


def draft(
    job_id: JobId, source: PromptSource, prompt_id: PromptId, purpose: Purpose, sampling: work_pb2.Sampling
) -> Draft:
    """The prompt of one row of `source`, with a new trace for its group: dropped where the row cannot be used."""
    row = row_of(prompt_id)
    try:
        found: PromptRow = source[row]
        prompt, ground_truth, extra_info = json_texts(found)
        lease = work_pb2.Lease(
            prompt_id=prompt_id,
            purpose=PURPOSE_NUMBERS[purpose],
            sampling=sampling,
            data_source=found.data_source,
            prompt=prompt,
            ground_truth=ground_truth,
            extra_info=extra_info,
            images=found.images,
            traceparent=_new_trace(job_id, prompt_id),
            issued_s=time.time(),
        )
    except BadRow as error:
        return DroppedPrompt(prompt_id, Drop(DropReason.BAD_ROW, str(error)))
    return QueuedPrompt(prompt_id, purpose, lease)


def _new_trace(job_id: JobId, prompt_id: PromptId) -> str:
    root = TraceContext.new(job_id, group=prompt_id)
    return (root if RECORDER.sampled(root.trace_id) else root.unsampled()).traceparent
