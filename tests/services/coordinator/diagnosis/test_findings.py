"""What is found in summaries written by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from millrace.rest import StepMetrics
from millrace.rest.diagnosis import Bottleneck, DiagnosisView
from millrace.rest.timeline import IdleCause as C
from millrace.spec.job import JobSpec
from millrace.telemetry.metrics.catalogue import find
from services.coordinator.diagnosis.findings import (
    CHANGES,
    METRICS,
    OF_CAUSE,
    SENTENCES,
    changes,
    diagnose,
    slow_replica,
)
from services.coordinator.diagnosis.summary import ReplicaPace, Summary, of_metrics

EVEN = (ReplicaPace("a", 30.0, 0.01, 5), ReplicaPace("b", 30.0, 0.011, 5))


def summary(loop_s: Mapping[C, float], **others: Any) -> Summary:
    return Summary(steps=10, seconds=sum(loop_s.values()), loop_s=loop_s, **({"max_staleness": 1} | others))


def job(**sections: Any) -> JobSpec:
    tree = {
        "name": "n",
        "output": "/o",
        "model": {"path": "/m"},
        "data": {"files": ["/d"]},
        "reward": {"function": "exact"},
        "evaluation": {"files": ["/e"]},
    }
    return JobSpec.model_validate(tree | sections)


def found(of: Summary) -> DiagnosisView:
    return diagnose("job-1", 1, 10, of, job(schedule={"max_staleness": of.max_staleness}))


AS_ADVISED = {
    "schedule.max_staleness": 1,
    "trainer.activation_recompute": False,
    "publication.path": "delta",
    "publication.commit": "shadow",
    "schedule.save_in_background": True,
    "rollout.samples_per_prompt": 1,
}


@pytest.mark.parametrize("bottleneck", list(Bottleneck))
def test_advice_names_the_present_value_and_is_never_what_the_job_has(bottleneck: Bottleneck) -> None:
    tree: dict[str, Any] = {"model": {"path": "/m", "lora": {"rank": 8}}}
    for setting, value in AS_ADVISED.items():
        section, name = setting.split(".")
        tree.setdefault(section, {})[name] = value
    told = changes(bottleneck, job(**tree))
    assert told, "something is left to try"
    raised = {"schedule.max_staleness"} if bottleneck in (Bottleneck.LONG_TAIL, Bottleneck.REWARDS) else set()
    off = {"trainer.activation_recompute"} if bottleneck is Bottleneck.MEMORY else set()
    assert not {change.setting for change in told} & {*AS_ADVISED, "model.lora"} - raised - off
    assert all("Now: " in change.advice for change in told if change.setting)
    other = changes(bottleneck, job(trainer={"activation_recompute": True}, schedule={"max_staleness": 0}))
    settings = {change.setting: change.advice for change in other}
    assert ("trainer.activation_recompute" in settings) is (bottleneck is Bottleneck.TRAINER)
    if bottleneck in (Bottleneck.TRAINER, Bottleneck.STALENESS_BOUND):
        assert settings["schedule.max_staleness"].endswith("Now: 0.")


@pytest.mark.parametrize(
    ("loop_s", "others", "expected"),
    [
        ({C.TRAINER: 80.0, C.GENERATION: 10.0, C.PUBLICATION: 10.0}, {"replicas": EVEN}, Bottleneck.TRAINER),
        ({C.TRAINER: 40.0, C.REWARDS: 60.0}, {"replicas": EVEN}, Bottleneck.REWARDS),
        ({C.TRAINER: 40.0, C.ENVIRONMENT: 60.0}, {"replicas": EVEN}, Bottleneck.ENVIRONMENT),
        ({C.TRAINER: 30.0, C.PUBLICATION: 70.0}, {"replicas": EVEN}, Bottleneck.PUBLICATION),
        ({C.TRAINER: 30.0, C.QUEUE: 70.0}, {}, Bottleneck.QUEUE),
        ({C.TRAINER: 30.0, C.LONG_TAIL: 70.0}, {"replicas": EVEN}, Bottleneck.LONG_TAIL),
        ({C.TRAINER: 30.0, C.LONG_TAIL: 70.0}, {"replicas": EVEN, "max_staleness": 0}, Bottleneck.STALENESS_BOUND),
        ({C.TRAINER: 90.0, C.GENERATION: 10.0}, {"token_budget": 512}, Bottleneck.MEMORY),
        ({C.TRAINER: 10.0, C.PUBLICATION: 90.0}, {"paused_for_lack_of_memory": 3}, Bottleneck.MEMORY),
        ({C.TRAINER: 30.0, C.EVALUATION: 70.0}, {"replicas": EVEN}, Bottleneck.EVALUATION),
        ({C.TRAINER: 30.0, C.CHECKPOINT: 70.0}, {"replicas": EVEN}, Bottleneck.CHECKPOINT),
    ],
)
def test_what_takes_most_is_named_first(
    loop_s: Mapping[C, float], others: Mapping[str, Any], expected: Bottleneck
) -> None:
    diagnosis = found(summary(loop_s, **others))
    assert diagnosis.bottleneck is diagnosis.findings[0].bottleneck is expected
    assert [f.share for f in diagnosis.findings] == sorted((f.share for f in diagnosis.findings), reverse=True)
    assert sum(diagnosis.loop_s.values()) == pytest.approx(diagnosis.step_s)
    assert diagnosis.findings[0].changes and diagnosis.findings[0].message.endswith(".")


def test_a_trainer_that_waits_for_busy_engines_is_not_the_bottleneck() -> None:
    """It takes most of each step. But the engines generate nearly all the time: it could only wait longer."""
    busy = tuple(replace(pace, busy_s=96.0) for pace in EVEN)
    diagnosis = found(summary({C.TRAINER: 70.0, C.GENERATION: 30.0}, replicas=busy))
    assert [finding.bottleneck for finding in diagnosis.findings] == [Bottleneck.GENERATION]
    idle = tuple(replace(pace, busy_s=35.0) for pace in EVEN)
    assert found(summary({C.TRAINER: 70.0, C.GENERATION: 30.0}, replicas=idle)).bottleneck is Bottleneck.TRAINER


def test_a_slow_replica_is_named() -> None:
    paces = (*EVEN, ReplicaPace("slow", 90.0, 0.05, 9))
    waits = summary({C.TRAINER: 20.0, C.GENERATION: 30.0, C.LONG_TAIL: 50.0}, replicas=paces, max_staleness=0)
    (finding, *_) = found(waits).findings
    assert (finding.bottleneck, finding.member) == (Bottleneck.LONG_TAIL, "slow")
    assert "slow is slower" in finding.message and finding.seconds == pytest.approx(8.0)
    seldom_last = (*EVEN, ReplicaPace("slow", 90.0, 0.05, 4))
    assert slow_replica(replace(waits, replicas=seldom_last)) is None
    assert slow_replica(replace(waits, replicas=EVEN)) is slow_replica(replace(waits, replicas=EVEN[:1])) is None


def test_what_costs_little_is_no_finding() -> None:
    diagnosis = found(summary({C.COORDINATION: 97.0, C.CHECKPOINT: 3.0}))
    assert diagnosis.bottleneck is None and diagnosis.findings == []


def test_without_spans_the_metrics_are_judged() -> None:
    spec = job()
    values = {
        "timing_s/train": 2.0,
        "timing_s/update_weights": 1.0,
        "timing_s/gen": 10.0,
        "timing_s/generate/max": 2.0,
        "timing_s/score/max": 8.0,
    }
    judged = of_metrics(spec, [StepMetrics(step=n, time_s=0.0, values=values) for n in (1, 2)], 0)
    assert judged.loop_s[C.REWARDS] == pytest.approx(16.0) and judged.seconds == pytest.approx(26.0)
    diagnosis = found(judged)
    assert diagnosis.bottleneck is Bottleneck.REWARDS and not diagnosis.from_spans
    assert [figure.name for figure in diagnosis.findings[0].figures] == ["timing_s/score/max"]
    nothing = of_metrics(spec, [StepMetrics(step=1, time_s=0.0, values={"timing_s/gen": 3.0})], 0)
    assert found(nothing).bottleneck is Bottleneck.GENERATION


def test_every_bottleneck_has_a_sentence_figures_and_changes() -> None:
    assert set(SENTENCES) == set(METRICS) == set(CHANGES) == set(Bottleneck)
    assert set(OF_CAUSE.values()) | {Bottleneck.MEMORY, Bottleneck.STALENESS_BOUND} == set(Bottleneck)
    for names in METRICS.values():
        assert all(find(name) for name in names), names


@pytest.mark.parametrize("setting", sorted({change.setting for of_one in CHANGES.values() for change in of_one} - {""}))
def test_each_setting_is_a_field_of_the_spec(setting: str) -> None:
    model: Any = JobSpec
    for name in setting.split("."):
        field = model.model_fields[name]
        models = [each for each in (field.annotation, *get_args(field.annotation)) if _is_model(each)]
        model = models[0] if models else None


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
