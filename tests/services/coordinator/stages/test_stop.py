"""When a job may stop early."""

import pytest

from millrace.errors import InvalidJob
from millrace.spec import parse
from millrace.spec.schedule import StopWhen
from services.coordinator.stages.stop import reason

FLAT = StopWhen(metric="m", flat_steps=4, flat_change=0.1)
RISING = {step: step / 10 for step in range(1, 9)}
LEVEL = {step: 0.5 + 0.05 * (step % 2) for step in range(1, 9)}


@pytest.mark.parametrize(
    ("rule", "values", "step", "cause"),
    [
        (StopWhen(metric="m", solved_at=0.8), RISING, 8, "solved"),
        (StopWhen(metric="m", solved_at=0.8), RISING, 7, None),
        (StopWhen(metric="m", solved_at=0.8), RISING, 9, None),  # this step has no value
        (FLAT, LEVEL, 8, "flat"),
        (FLAT, LEVEL, 7, None),  # not two windows yet
        (FLAT, RISING, 8, None),
        (FLAT, {4: 0.5, 8: 0.55}, 8, "flat"),  # an evaluation every 4 steps
        (FLAT, {8: 0.5}, 8, None),
        (FLAT, {4: 0.9, 8: 0.1}, 8, "flat"),
    ],
)
def test_a_job_stops_when_it_is_solved_or_flat(
    rule: StopWhen, values: dict[int, float], step: int, cause: str | None
) -> None:
    found = reason(rule, values, step)
    assert (None if found is None else found[0]) == cause


@pytest.mark.parametrize(
    ("schedule", "every", "told"),
    [
        ({"stop_when": {}}, 5, "neither schedule.stop_when.solved_at nor"),
        ({"stop_when": {"solved_at": 0.9}}, 0, "schedule.stop_when.metric: .*evaluation.every_steps is not given"),
        ({"stop_when": {"flat_steps": 4}}, 5, "raise it to at least 5"),
        ({"keep_best": "evaluation/held_out"}, 5, "set schedule.save_every_steps"),
        ({"keep_best": "-val-core/a/reward/mean@1", "save_every_steps": 5}, 0, "set evaluation.every_steps"),
        ({"keep_best": "critic/score/mean", "save_every_steps": 5}, 0, None),
        ({"stop_when": {"metric": "critic/score/mean", "flat_steps": 50}}, 0, None),
    ],
)
def test_metrics_that_no_step_has_are_refused(schedule: dict, every: int, told: str | None) -> None:
    tree = {"name": "a", "model": {"path": "/m"}, "data": {"files": ["/d.jsonl"]}, "schedule": schedule}
    tree |= {"evaluation": {"files": ["/e.jsonl"], "every_steps": every}}
    if told is None:
        parse(tree)
        return
    with pytest.raises(InvalidJob, match=told):
        parse(tree)
