"""Finds the declaration of a step metric and checks the keys that a service reports.

A key that is not declared is a mistake in Millrace. It costs no job: in production it is kept and logged once. If
`MILLRACE_STRICT_METRICS` is set, as in all tests, it raises UndeclaredMetric.
"""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import structlog

from millrace.telemetry.metrics.declaration import Owner, StepMetric
from millrace.telemetry.metrics.step import (
    batch,
    evaluation,
    losses,
    memory,
    mismatch,
    performance,
    publication,
    timing,
)


@dataclass(frozen=True)
class Section:
    """The step metrics of one subject, as docs/metrics.md has them."""

    heading: str
    introduction: str
    metrics: tuple[StepMetric, ...]


SECTIONS = (
    Section("Time", timing.__doc__, timing.TIMING),
    Section("The batch", batch.__doc__, batch.BATCH),
    Section("Losses and updates", losses.__doc__, losses.LOSSES),
    Section("Engine against trainer", mismatch.__doc__, mismatch.MISMATCH),
    Section("Performance", performance.__doc__, performance.PERFORMANCE),
    Section("Memory", memory.__doc__, memory.MEMORY),
    Section("Publication", publication.__doc__, publication.PUBLICATION),
    Section("Evaluation", evaluation.__doc__, evaluation.EVALUATION),
)
STEP_METRICS = tuple(metric for section in SECTIONS for metric in section.metrics)

STRICT = "MILLRACE_STRICT_METRICS"
"""Environment variable: any value but the empty one makes an undeclared metric an error."""

log = structlog.get_logger(__name__)
_BY_KEY = {metric.key: metric for metric in STEP_METRICS if not metric.placeholders}
_FAMILIES = sorted((metric for metric in STEP_METRICS if metric.placeholders), key=lambda metric: metric.user_defined)


class UndeclaredMetric(Exception):
    """A service reported a metric that nobody declared, or that another service owns."""


@cache
def find(key: str) -> StepMetric | None:
    """The declaration of `key`; None if there is none. A user-defined family covers only what no other does."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    return next((family for family in _FAMILIES if family.covers(key)), None)


def check(keys: Iterable[str], owners: Collection[Owner], *, user_defined: bool = False) -> None:
    """Checks that each of the step metrics `keys` is declared and belongs to one of `owners`.

    `user_defined` says whether the job has a function of the user's own, whose names may be anything. Raises
    UndeclaredMetric in strict mode, otherwise logs each key once.
    """
    for key in keys:
        metric = find(key)
        if metric is None or (metric.user_defined and not user_defined):
            complain(key, "is not declared in millrace/telemetry/metrics/step")
        elif metric.owner not in owners:
            complain(key, f"is declared as owned by the {metric.owner}, but the {' or '.join(owners)} reported it")


def complain(name: str, problem: str) -> None:
    """Raises UndeclaredMetric in strict mode; otherwise logs the problem of the metric `name` once."""
    if os.environ.get(STRICT):
        raise UndeclaredMetric(f"the metric {name!r} {problem}.")
    _warn(name, problem)


@cache
def _warn(name: str, problem: str) -> None:
    log.warning("a metric is not declared", metric=name, problem=problem)
