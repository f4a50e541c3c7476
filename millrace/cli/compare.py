"""`millrace compare`: what is different between two jobs, and how their main metrics went."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from rich.markup import escape
from rich.table import Table

from millrace.cli.names import JobName, job_id
from millrace.rest import Figure, JobView, StepMetrics
from millrace.rest.coverage import Coverage, covered
from millrace.terminal.output import AsJson, Url, connect, held_out, people, print_json, styled, table
from millrace.validation.kinds import leaves

COMPARED = ("critic/score/mean", "critic/rewards/mean", "perf/throughput", "timing_s/step")
"""Metrics that are compared, after those of held-out prompts."""
ABSENT = "–"
Which = Literal["first", "best", "last"]


class Course(BaseModel):
    """How one metric of a job went over its steps."""

    first: Figure
    best: Figure | None = Field(description="The highest finite value; of seconds, the lowest. Null if none is finite.")
    last: Figure
    coverage: dict[Which, Coverage] = Field(
        {}, description="Of metrics of held-out prompts: how many of the evaluation's prompts have a score."
    )


class Comparison(BaseModel):
    """Two jobs side by side: every pair has the first job's value, then the second's."""

    jobs: tuple[str, str] = Field(description="Ids.")
    spec: dict[str, tuple[Any, Any]] = Field(
        description="Fields of the job spec with different values; null where a spec does not have the field."
    )
    metrics: dict[str, tuple[Course | None, Course | None]]


def compare(one: JobName, other: JobName, url: Url = None, as_json: AsJson = False) -> None:
    """Compare two jobs: the fields of their specs that differ, and their main metrics.

    Of each metric the first, the best and the last value are shown: of seconds the best is the lowest, of all others
    the highest. The metrics of held-out prompts begin before training.
    """
    with connect(url) as client:
        jobs = [client.job(job_id(client, given)) for given in (one, other)]
        rows = [client.metrics(job.id, after_step=-1) for job in jobs]
    made = comparison(jobs, rows)
    if as_json:
        return print_json(made)
    console = people()
    console.print(_heads(jobs))
    console.print()
    console.print(_spec_table(made) if made.spec else "The job specs are equal.")
    console.print()
    console.print(_metrics_table(made) if made.metrics else "Neither job has trained a step.")


def comparison(jobs: Sequence[JobView], rows: Sequence[Sequence[StepMetrics]]) -> Comparison:
    """Compares two jobs. `rows` has the step metrics of each, in the order of the steps."""
    one, other = (dict(leaves(job.spec)) for job in jobs)
    fields = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
    different = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    named = _compared({name for job in rows for row in job for name in row.values})
    courses = {name: (_course(name, rows[0]), _course(name, rows[1])) for name in named}
    return Comparison(jobs=(jobs[0].id, jobs[1].id), spec=different, metrics=courses)


def _compared(names: Iterable[str]) -> list[str]:
    from millrace.telemetry.metrics.catalogue import find
    from millrace.telemetry.metrics.step.evaluation import EVALUATION_RESULTS

    known = set(names)
    results = sorted(name for name in known if find(name) in EVALUATION_RESULTS)
    return [*results, *(name for name in COMPARED if name in known)]


def _course(name: str, rows: Iterable[StepMetrics]) -> Course | None:
    from millrace.telemetry.metrics.catalogue import find
    from millrace.telemetry.metrics.declaration import Unit
    from millrace.telemetry.metrics.step.evaluation import EVALUATION_RESULTS

    having = [row.values for row in rows if name in row.values]
    if not having:
        return None
    declared = find(name)
    choose = min if declared is not None and declared.unit is Unit.SECONDS else max
    finite = [values for values in having if math.isfinite(values[name])]
    best = choose(finite, key=lambda values: values[name], default=None)
    chosen: dict[Which, Mapping[str, float]] = {"first": having[0], "last": having[-1]}
    if best is not None:
        chosen["best"] = best
    coverage = {which: _coverage(values) for which, values in chosen.items() if declared in EVALUATION_RESULTS}
    return Course(
        first=having[0][name],
        best=None if best is None else best[name],
        last=having[-1][name],
        coverage={which: found for which, found in coverage.items() if found is not None},
    )


def _coverage(values: Mapping[str, float]) -> Coverage | None:
    from millrace.telemetry.metrics.step.evaluation import ASKED_PROMPTS, SCORED_PROMPTS

    return Coverage.of(values.get(SCORED_PROMPTS), values.get(ASKED_PROMPTS))


def _heads(jobs: Sequence[JobView]) -> Table:
    rows = table("", *(job.id for job in jobs))
    rows.add_row("[bold]name[/]", *(escape(job.name) for job in jobs))
    rows.add_row("[bold]state[/]", *(styled(job.status) for job in jobs))
    rows.add_row("[bold]step[/]", *(f"{job.step} of {job.steps_shown}" for job in jobs))
    rows.add_row("[bold]held-out[/]", *map(held_out, jobs))
    return rows


def _spec_table(made: Comparison) -> Table:
    rows = table("FIELD", *made.jobs)
    for column in rows.columns:
        column.no_wrap, column.overflow = False, "fold"
    for name, pair in sorted(made.spec.items()):
        rows.add_row(name, *(escape(_written(value)) for value in pair))
    return rows


def _written(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value)


def _metrics_table(made: Comparison) -> Table:
    rows = table("METRIC", "", *(f">{job}" for job in made.jobs))
    rows.columns[0].no_wrap, rows.columns[0].overflow = False, "fold"
    for name, courses in made.metrics.items():
        lines: list[tuple[str, Which]] = [(name, "first"), ("", "best"), ("", "last")]
        for label, which in lines:
            rows.add_row(escape(label), which, *(_figure(course, which) for course in courses))
    return rows


def _figure(course: Course | None, which: Which) -> str:
    value: float | None = None if course is None else getattr(course, which)
    return ABSENT if course is None or value is None else covered(f"{value:.6g}", course.coverage.get(which))
