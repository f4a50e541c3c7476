"""Spans of a trace for the stages of the job loop, where traces are exported."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from millrace.telemetry import tracing
from services.coordinator.stages.run import Run

Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")
Stage = Callable[Concatenate[Run, Rest], Coroutine[Any, Any, Answer]]


def traced(stage: Stage[Rest, Answer]) -> Stage[Rest, Answer]:
    """Decorates a stage: each call is a span with the stage's name and with job, step and version as attributes."""
    tracer = tracing.tracer(stage.__module__)

    @functools.wraps(stage)
    async def run_stage(run: Run, /, *arguments: Rest.args, **named: Rest.kwargs) -> Answer:
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
    """The current span as a W3C `traceparent`; empty where traces are not exported."""
    return dict(tracing.outgoing()).get("traceparent", "")
