"""The table of the trainer's memory in a report."""

from millrace.rest import StepMetrics
from services.coordinator.stages.report import memory_by_phase, memory_lines

SCORING, UPDATE = (57.0, 55.5), (47.1, 46.0)
"""Peaks of a job whose reference has a large token budget, predicted and measured, GiB."""


def row(step: int, more: dict[str, float] | None = None) -> StepMetrics:
    peaks = {
        f"memory/{phase}{kind}/peak": peak
        for phase, both in {"update": UPDATE, "scoring": SCORING}.items()
        for kind, peak in zip(("/predicted", ""), both, strict=True)
    }
    return StepMetrics(step=step, time_s=0.0, values={"memory/load/weights": 5.0, **peaks, **(more or {})})


def test_each_phase_is_compared_with_its_own_prediction() -> None:
    found = memory_by_phase([row(1), row(2, {"memory/update/peak": 46.5})])
    assert list(found) == ["load", "scoring", "update"]
    assert found["scoring"] == {"peak": {"predicted": 57.0, "measured": 55.5}}
    assert found["update"] == {"peak": {"predicted": 47.1, "measured": 46.5}}  # the most of any step


def test_what_was_only_predicted_or_only_measured_has_a_dash_for_the_other() -> None:
    more = {"memory/update/predicted/logits": 3.9, "memory/update/rest": 12.25, "memory/scoring/offloaded": 1.0}
    lines = list(memory_lines(memory_by_phase([row(1, more)])))
    assert "| predicted → measured | load | scoring | update |" in lines
    parts = [line for line in lines if line.startswith("| ")][1:]
    assert parts == [
        "| weights | – → 5 | – | – |",
        "| logits | – | – | 3.9 → – |",
        "| rest | – | – | – → 12.25 |",
        "| peak | – | 57 → 55.5 | 47.1 → 46 |",
        "| offloaded | – | – → 1 | – |",
    ]


def test_a_job_without_steps_has_no_table() -> None:
    assert list(memory_lines(memory_by_phase([]))) == []
