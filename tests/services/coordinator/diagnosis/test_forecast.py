"""Forecasts from lengths and rates that are known: what is forecast is what such a job takes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from millrace.cli.show import lines
from millrace.rest import StepMetrics
from millrace.rest.timeline import IdleCause as C
from millrace.simulation.job import simulate
from millrace.simulation.setting import Drawn, MeasuredRate, Request, TrainerRate
from millrace.spec.job import JobSpec
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span
from services.coordinator.diagnosis.findings import diagnose
from services.coordinator.diagnosis.forecast import Measured, forecast
from services.coordinator.diagnosis.summary import Summary, of_spans
from services.coordinator.timeline.idle import Activity
from tests.services.coordinator.diagnosis.test_findings import job
from tests.simulation.jobs import setting

LENGTHS = [float(20 * place * place // 40 + 5) for place in range(40)]
RATE = MeasuredRate((0, 64), (0.003, 0.003 + 64 * 0.0001))
KNOWN = Measured(LENGTHS, RATE, replicas=1, slots=32, prompt_tokens=20.0, train_s=3.0, publication_s=0.1, pause_s=0.02,
                 score_s=0.05, between_s=0.2)  # fmt: skip


def spec(max_staleness: int, streaming: bool | str = False) -> JobSpec:
    schedule = {"prompts_per_step": 8, "max_staleness": max_staleness}
    return job(schedule=schedule, rollout={"samples_per_prompt": 4}, trainer={"streaming": streaming})


def taken(max_staleness: int, **changes: object) -> float:
    """Seconds of a step of such a job."""
    of = setting(
        Drawn(LENGTHS, 8, 4, seed=7), prompts=8, samples=4, engine=RATE, slots=32, prompt_tokens=20.0, score_s=0.05
    )
    tokens = 32 * (20 + sum(LENGTHS) / 40)
    of = replace(of, trainer=TrainerRate(token_s=3.0 / tokens), publication_s=0.1, pause_s=0.02, between_s=0.2)
    return simulate(replace(of, max_staleness=max_staleness, **changes), 30).step_s  # type: ignore[arg-type]


def test_another_bound_is_forecast_as_such_a_job_is() -> None:
    found = forecast(KNOWN, spec(0), taken(0))
    assert found.simulated_s == pytest.approx(taken(0), rel=0.1)
    told = {(each.setting, each.value): each.step_s for each in found.others}
    assert told[("schedule.max_staleness", 1)] == pytest.approx(taken(1), rel=0.1)
    assert told[("schedule.max_staleness", 1)] < 0.9 * taken(0)
    assert told[("replicas", 2)] == pytest.approx(taken(0, replicas=2), rel=0.1)
    assert told[("trainer.streaming", True)] == pytest.approx(taken(0, streaming=True), rel=0.1)


def test_a_job_that_streams_is_simulated_so_unless_it_needs_the_whole_batch() -> None:
    streams = spec(0, "auto")
    assert KNOWN.setting(streams).streaming and not KNOWN.setting(spec(1, "auto")).streaming
    assert ("trainer.streaming", True) not in {
        (each.setting, each.value) for each in forecast(KNOWN, streams, taken(0, streaming=True)).others
    }
    whole = streams.model_copy(update={"algorithm": spec(0).algorithm.model_copy(update={"top_entropy_fraction": 0.5})})
    assert not KNOWN.setting(whole).streaming


def test_what_would_not_help_is_not_told() -> None:
    """The trainer takes most of each step, and never waits."""
    slow = replace(KNOWN, train_s=60.0)
    assert forecast(slow, spec(2), 60.3).others == []


def test_nothing_is_forecast_from_a_simulation_that_is_wrong_about_the_job_as_it_is() -> None:
    found = forecast(KNOWN, spec(0), 3 * taken(0))
    assert found.simulated_s == pytest.approx(taken(0), rel=0.1) and found.others == ()


def test_rates_come_from_the_requests() -> None:
    """Four requests at a time, each with a token every 10 ms."""
    requests = [Request("a", start, start + 1.0, 100.0) for start in (0.0, 1.0, 2.0) for _ in range(4)]
    found = Measured.of(requests, 4, {"timing_s/train": 2.0, "prompt_length/mean": 7.0}, between_s=0.5)
    assert found is not None and found.engine.decode(4, 0.0) == pytest.approx(0.01)
    made = found.setting(spec(1))
    assert (made.prompts, made.samples, made.slots, made.replicas, made.max_staleness) == (8, 4, 4, 1, 1)
    schedule = {"carried_prompts": 3, "staleness_of": "mean", "too_stale": "drop", "wait_for_slow": True}
    other = spec(1).model_copy(update={"schedule": spec(1).schedule.model_copy(update=schedule)})
    assert {name: getattr(found.setting(other), name) for name in schedule} == schedule
    assert made.trainer.token_s * 32 * 107 == pytest.approx(2.0) and made.between_s == 0.5
    assert Measured.of([], 4, {}) is None


def test_a_diagnosis_tells_the_forecasts_and_the_error() -> None:
    seconds = taken(0)
    summary = Summary(steps=1, seconds=seconds, loop_s={C.LONG_TAIL: seconds}, max_staleness=0, measured=KNOWN)
    found = diagnose("job-1", 1, 1, summary, spec(0))
    assert found.simulated_s is not None and {each.setting for each in found.forecasts} == {
        "schedule.max_staleness",
        "trainer.streaming",
        "replicas",
    }
    said = "\n".join(lines(found))
    assert f"Simulated, a step takes {found.simulated_s:.3g} s (" in said
    assert f"[bold]schedule.max_staleness[/]: 1 → {found.forecasts[0].step_s:.3g} s a step" in said
    without = diagnose("job-1", 1, 1, replace(summary, measured=None), spec(0))
    assert without.simulated_s is None and without.forecasts == []


def spans(kind: SpanKind, times: Sequence[tuple[float, float]], **figures: float) -> list[Span]:
    return [Span(kind, TraceContext.new("job-1"), "", start, end, "", figures) for start, end in times]


def test_lengths_and_rates_are_read_from_the_spans() -> None:
    """Answers outside the window do not count."""
    answers = [(100.0 + second, 101.0 + second) for second in range(10) for _ in range(4)]
    replica = [
        *spans(SpanKind.GENERATE, [*answers, (50.0, 60.0)], tokens=100.0),
        *spans(SpanKind.LEASE, answers, capacity=16.0),
        *spans(SpanKind.PAUSE, [(102.0, 102.5)]),
    ]
    activity = Activity.of({(LaneKind.ROLLOUT, "a"): replica}, 100.0, 110.0, 2)
    rows = [StepMetrics(step=1, time_s=110.0, values={"timing_s/train": 2.0, "timing_s/update_weights": 0.5})]
    found = of_spans(activity, 1, 2, spec(1), rows, 0).measured
    assert found is not None and found.lengths == [100.0] * 40
    assert found.engine.decode(4, 0.0) == pytest.approx(0.01)
    assert (found.slots, found.replicas, found.pause_s, found.train_s, found.publication_s) == (16, 1, 0.5, 2.0, 0.5)
    plays = job(rollout={"environment": {"name": "calculator", "renderer": "default"}})
    assert of_spans(activity, 1, 2, plays, rows, 0).measured is None
