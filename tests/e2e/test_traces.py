"""The trace of one group, from the submission over REST to the optimizer's step, in a collector of the test's own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from millrace.local.stack import Stack
from tests.e2e.collector import Collector, Received
from tests.e2e.conftest import finished, until

pytestmark = pytest.mark.matrix  # test_timeline.py covers it without a collector

ROOTS = {"start", "step", "group"}
"""Spans that last as long as what they are the roots of: they explain nothing."""


def one(spans: Iterable[Received], name: str) -> Received:
    (found,) = [span for span in spans if span.name == name]
    return found


def largest_gap(spans: Iterable[Received], start_s: float, end_s: float) -> float:
    """The longest time between `start_s` and `end_s` in which none of the spans lies."""
    reached, gap = start_s, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.start_s < end_s:
            gap = max(gap, span.start_s - reached)
            reached = max(reached, span.end_s)
    return max(gap, end_s - reached)


def test_one_group_from_rest_to_the_optimizer(
    start: Callable[..., Stack], job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        job["schedule"] |= {"steps": 2}
        stack = start(replicas=1, engine="transformers")
        with stack.client() as client:
            finished(client, client.submit(job).id)

        def arrived() -> Sequence[Received] | None:
            spans = collector.spans
            steps = [span for span in spans if span.name == "step"]
            trained = [span for span in spans if span.name == "report"]
            return spans if len(steps) == 2 and len(trained) == 2 else None

        spans = until("the spans of both steps", arrived, 60.0)
    assert {span.service for span in spans} == {"millrace-coordinator", "millrace-trainer", "millrace-rollout"}
    by_id = {span.span_id: span for span in spans}
    begun = one(spans, "start")
    for root in [span for span in spans if span.name == "group"]:
        of_step = one((s for s in spans if s.name == "step" and s.trace_id in root.links), "step")
        assert root.trace_id in of_step.links
        whole = [span for span in spans if span.trace_id in (root.trace_id, of_step.trace_id)]
        update = max((span for span in whole if span.name == "update"), key=lambda span: span.end_s)
        assert {span.service for span in whole} == {"millrace-coordinator", "millrace-trainer", "millrace-rollout"}
        assert all(span.parent_id in by_id for span in whole if span.name not in ROOTS)
        told = [span for span in whole if span.name not in ROOTS]
        gap = largest_gap(told, root.start_s, update.end_s)
        assert gap <= 0.05 * (update.end_s - root.start_s), (root.attributes, gap)
    # From REST: the submission and the start of the job come before the first step.
    first = min((span for span in spans if span.name == "update"), key=lambda span: span.end_s)
    submitted = one(spans, "submit")
    assert submitted.trace_id == begun.trace_id
    told = [span for span in spans if span.name not in ROOTS and span.attributes["millrace.step"] in (0, 1)]
    gap = largest_gap(told, submitted.start_s, first.end_s)
    assert gap <= 0.05 * (first.end_s - submitted.start_s), gap
