"""What `millrace show` prints of a step."""

import pytest
from rich.console import Console

from millrace.cli.show import MAIN_METRICS, every_metric, main_metrics
from millrace.telemetry.metrics.catalogue import find
from millrace.telemetry.metrics.declaration import StepMetric


def printed(table: object) -> list[str]:
    console = Console(record=True, width=120, highlight=False)
    console.print(table)
    return console.export_text().rstrip().splitlines()


@pytest.mark.parametrize("name", MAIN_METRICS)
def test_the_main_metrics_are_declared(name: str) -> None:
    found = find(name)
    assert isinstance(found, StepMetric) and not found.user_defined


def test_the_main_metrics_of_a_step_need_few_lines_and_all_of_them_one_each() -> None:
    values = dict.fromkeys((*MAIN_METRICS, *(f"val-aux/{n}/reward/mean@1" for n in range(70))), 0.5)
    few = printed(main_metrics(values))
    assert len(few) <= 15 and few[-1].strip() == "--all shows 70 more"
    assert all(name in "\n".join(few) for name in MAIN_METRICS)
    assert len(printed(every_metric(values))) == 1 + len(values)


def test_metrics_that_the_step_does_not_have_leave_no_gap() -> None:
    lines = printed(main_metrics({"critic/score/mean": 0.25, "timing_s/step": 3.5}))
    assert [line.split() for line in lines if line.strip()] == [["critic/score/mean", "0.25", "timing_s/step", "3.5"]]
