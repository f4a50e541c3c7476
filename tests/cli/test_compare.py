import json
import math
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millrace.cli import app
from millrace.cli.compare import COMPARED, _metrics_table, comparison
from millrace.client import Client
from millrace.rest import JobState, JobView, StepMetrics
from millrace.telemetry.metrics.catalogue import find

HELD_OUT = "val-core/demo/reverse/reward/mean@1"
SPEC = {"name": "one", "trainer": {"optimizer": {"lr": 1e-6}, "seed": 0}, "data": {"files": ["/a"]}, "evaluation": None}


def job(id: str, spec: dict[str, Any], step: int = 2) -> JobView:
    return JobView(
        id=id, name=spec["name"], state=JobState.RUNNING, step=step, steps=9, version=step, created_s=0.0, spec=spec
    )


def rows(*values: dict[str, float]) -> list[StepMetrics]:
    return [StepMetrics(step=step, time_s=0.0, values=each) for step, each in enumerate(values)]


ONE = job("job-000000000001", SPEC)
OTHER = job(
    "job-000000000002",
    {
        "name": "[two]",
        "trainer": {"optimizer": {"lr": 2e-6}, "seed": 0},
        "data": {"files": ["/a", "/b"]},
        "evaluation": {"prompts": 4},
    },
)
ONE_ROWS = rows(
    {HELD_OUT: 0.1},
    {"critic/rewards/mean": 0.5, "timing_s/step": 3.0, "actor/lr": 1.0},
    {"critic/rewards/mean": math.nan, "timing_s/step": 2.0},
    {"critic/rewards/mean": 0.4, "timing_s/step": 2.5, HELD_OUT: 0.3},
)


def test_every_compared_metric_is_declared() -> None:
    assert all(find(name) for name in (*COMPARED, HELD_OUT))


def test_fields_that_are_equal_are_left_out() -> None:
    assert comparison([ONE, OTHER], [[], []]).spec == {
        "name": ("one", "[two]"),
        "trainer.optimizer.lr": (1e-6, 2e-6),
        "data.files": (["/a"], ["/a", "/b"]),
        "evaluation.prompts": (None, 4),
    }
    assert comparison([ONE, ONE], [[], []]).spec == {}


def test_the_best_of_seconds_is_the_lowest_and_what_is_not_finite_is_never_best() -> None:
    metrics = comparison([ONE, OTHER], [ONE_ROWS, []]).metrics
    assert list(metrics) == [HELD_OUT, "critic/rewards/mean", "timing_s/step"]
    found = {name: course and (course.first, course.best, course.last) for name, (course, _) in metrics.items()}
    assert found == {
        HELD_OUT: (0.1, 0.3, 0.3),
        "critic/rewards/mean": (0.5, 0.5, 0.4),
        "timing_s/step": (3.0, 2.0, 2.5),
    }
    assert all(other is None for _, other in metrics.values())
    assert all(course is None or not course.coverage for course, _ in metrics.values())


def test_each_held_out_figure_has_the_coverage_of_its_own_evaluation() -> None:
    counts = {"val-aux/scored_prompts": 256.0, "val-aux/asked_prompts": 256.0}
    partial = counts | {"val-aux/scored_prompts": 107.0}
    found = rows(counts | {HELD_OUT: 0.1}, partial | {HELD_OUT: 0.9, "timing_s/step": 1.0}, counts | {HELD_OUT: 0.4})
    made = comparison([ONE, OTHER], [found, []])
    course, _ = made.metrics[HELD_OUT]
    assert course is not None and {which: str(each) for which, each in course.coverage.items()} == {
        "first": "256 of 256",
        "best": "107 of 256",
        "last": "256 of 256",
    }
    seconds, _ = made.metrics["timing_s/step"]
    assert seconds is not None and not seconds.coverage
    console = Console(record=True, width=120, highlight=False)
    console.print(_metrics_table(made))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert f"{HELD_OUT} first 0.1 –" in lines and "best 0.9 (107 of 256) –" in lines and "last 0.4 –" in lines


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that the client gets instead of asking a coordinator."""
    jobs = {each.id: each for each in (ONE, OTHER)}
    metrics = {ONE.id: ONE_ROWS, OTHER.id: rows({}, {"critic/rewards/mean": math.inf})}
    monkeypatch.setattr(Client, "job", lambda self, job_id: jobs[job_id])
    monkeypatch.setattr(Client, "metrics", lambda self, job_id, after_step: metrics[job_id])


@pytest.mark.usefixtures("known")
def test_both_jobs_stand_side_by_side() -> None:
    result = CliRunner().invoke(app, ["compare", ONE.id, OTHER.id])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    for line in (
        ["name", "one", "[two]"],
        ["trainer.optimizer.lr", "1e-06", "2e-06"],
        ["evaluation.prompts", "–", "4"],
        [HELD_OUT, "first", "0.1", "–"],
        ["critic/rewards/mean", "first", "0.5", "inf"],
        ["best", "0.5", "–"],
        ["last", "0.4", "inf"],
    ):
        assert line in lines, result.stdout


@pytest.mark.usefixtures("known")
def test_json_is_for_programs() -> None:
    found = json.loads(CliRunner().invoke(app, ["compare", ONE.id, OTHER.id, "--json"]).stdout)
    assert found["jobs"] == [ONE.id, OTHER.id] and found["spec"]["trainer.optimizer.lr"] == [1e-6, 2e-6]
    assert found["metrics"]["critic/rewards/mean"][1] == {
        "first": "Infinity",
        "best": None,
        "last": "Infinity",
        "coverage": {},
    }
