"""The loop's stages as spans of a trace, where traces are on."""

import functools
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from millrace.telemetry import tracing
from services.coordinator.run import Run

Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")
Stage = Callable[Concatenate[Run, Rest], Awaitable[Answer]]


def traced(stage: Stage[Rest, Answer]) -> Stage[Rest, Answer]:
    """A span of the stage's name around each of its calls, with job, step and version."""
    tracer = tracing.tracer(stage.__module__)

    @functools.wraps(stage)
    async def run_stage(run: Run, *arguments: Rest.args, **named: Rest.kwargs) -> Answer:
        job = run.job
        about: dict[str, str | int] = {
            "millrace.job": job.id,
            "millrace.step": job.step,
            "millrace.version": job.version,
        }
        with tracer.start_as_current_span(stage.__name__, attributes=about):
            return await stage(run, *arguments, **named)

    return run_stage


def traceparent() -> str:
    """The current span in W3C's form; empty without tracing."""
    return dict(tracing.outgoing()).get("traceparent", "")
