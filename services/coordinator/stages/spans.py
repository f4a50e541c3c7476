"""Spans of the stages of the job loop. Each step has a trace, whose root lasts from one publication to the next."""

import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from millrace.telemetry.spans.context import TraceContext, within
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.coordinator.stages.run import Run
from services.coordinator.state.group import GroupSummary

Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")
Stage = Callable[Concatenate[Run, Rest], Coroutine[Any, Any, Answer]]
OF_THE_VERSION = (SpanKind.CONFIGURE, SpanKind.PUBLISH)
"""Stages that belong to the version that the trainer holds. All others belong to the step after it."""
IDLE_S = 0.001
"""A stage that had nothing to do takes less than this; it is no span."""


def traced(kind: SpanKind) -> Callable[[Stage[Rest, Answer]], Stage[Rest, Answer]]:
    """Decorates a stage: each call is a span."""

    def decorate(stage: Stage[Rest, Answer]) -> Stage[Rest, Answer]:
        @functools.wraps(stage)
        async def run_stage(run: Run, /, *arguments: Rest.args, **named: Rest.kwargs) -> Answer:
            with stage_span(run, kind):
                return await stage(run, *arguments, **named)

        return run_stage

    return decorate


@contextmanager
def stage_span(run: Run, kind: SpanKind, step: int | None = None) -> Iterator[None]:
    """Records the block as a span of `step`; None: the one that the stage belongs to. A publication is the end of its
    step."""
    step = step_of(run, kind) if step is None else step
    context = step_context(run, step)
    began_s = run.step_began.setdefault(step, time.time())
    try:
        with within(context), RECORDER.span(kind, at_least_s=IDLE_S):
            yield
    finally:
        if kind is SpanKind.PUBLISH:
            _close(run, context, began_s)


def step_of(run: Run, kind: SpanKind) -> int:
    """The step that a stage belongs to."""
    after = kind not in OF_THE_VERSION and not run.done
    return run.job.step + after


def step_context(run: Run, step: int) -> TraceContext:
    """The root of a step's trace."""
    context = TraceContext.of_step(run.job.id, run.job.lineage, step)
    return context if RECORDER.sampled(context.trace_id) else context.unsampled()


def _close(run: Run, context: TraceContext, began_s: float) -> None:
    """Records the root of a step, or of the start of a job. The next step begins now."""
    now, first = time.time(), context.step == 0
    kind, began_s = (SpanKind.START, run.job.created_s) if first else (SpanKind.STEP, began_s)
    RECORDER.root(kind, context, began_s, now, links=tuple(run.groups_of_step))
    run.groups_of_step.clear()
    run.step_began = {context.step + 1: now}


def close_groups(run: Run, groups: Sequence[GroupSummary], used_s: float, step: int | None = None) -> None:
    """Records the ends of the traces of `groups`, which `step` (None: the next one), or an evaluation in its time, has
    used since the Unix time `used_s`: how long each complete group waited for that, and its root."""
    step, now = step_of(run, SpanKind.TRAIN) if step is None else step, time.time()
    of_step = step_context(run, step)
    for group in groups:
        root = TraceContext.parse(group.traceparent, job_id=run.job.id, step=step, group=group.prompt_id)
        if root is None:
            continue
        RECORDER.past(SpanKind.HOLD, root, group.completed_s or used_s, used_s)
        RECORDER.root(SpanKind.GROUP, root, group.issued_s or used_s, now, links=(of_step,))
        run.groups_of_step.append(root)
