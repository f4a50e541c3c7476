"""Causes of idle time, on timelines written by hand."""

from collections.abc import Sequence

import pytest

from millrace.ids import JobId, MemberId
from millrace.rest.timeline import IdleCause, LaneView
from millrace.telemetry.spans.batches import Batch
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span
from services.coordinator.timeline.lanes import timeline

JOB = JobId("job-0123456789ab")
K = SpanKind
Made = tuple[SpanKind, float, float]


def of_step(step: int, *made: Made) -> list[Span]:
    """Spans of a step's trace; a span of the kind STEP is its root."""
    root = TraceContext.of_step(JOB, 1, step)
    return [
        Span(kind, root if kind is K.STEP else root.child(), "" if kind is K.STEP else root.span_id, start, end)
        for kind, start, end in made
    ]


def of_group(step: int, prompt: str, *made: Made) -> tuple[list[Span], list[Span]]:
    """Spans of a group that was trained in `step`: those of the coordinator, and those of a replica."""
    root = TraceContext(f"{int(prompt.replace('-', ''), 16):032x}", f"{int(prompt[-1]) + 1:016x}", True, JOB, 0, prompt)
    trained = TraceContext(root.trace_id, root.span_id, True, JOB, step, prompt)
    spans = [Span(kind, root.child(), root.span_id, start, end) for kind, start, end in made]
    first, last = min(start for _, start, _ in made), max(end for _, _, end in made)
    own = [Span(K.GROUP, trained, "", first, last), *(span for span in spans if span.kind is K.QUEUE)]
    return own, [span for span in spans if span.kind is not K.QUEUE]


def lanes(coordinator: Sequence[Span], trainer: Sequence[Span], **replicas: Sequence[Span]) -> dict[str, LaneView]:
    batches = [
        Batch(MemberId("coordinator"), LaneKind.COORDINATOR, coordinator),
        Batch(MemberId("trainer-1"), LaneKind.TRAINER, trainer),
        *(Batch(MemberId(name), LaneKind.ROLLOUT, spans) for name, spans in replicas.items()),
    ]
    view = timeline(JOB, batches, 1, 1)
    assert (view.start_s, view.end_s) == (100.0, 110.0)
    return {lane.member if lane.kind is not LaneKind.REWARDS else "rewards": lane for lane in view.lanes}


STEP = ((K.STEP, 100, 110), (K.ADMIT, 100, 106), (K.TRAIN, 106, 109), (K.PUBLISH, 109, 110))


def close(lane: LaneView, expected: dict[IdleCause, float]) -> None:
    assert lane.idle_s == pytest.approx(expected, abs=0.02)
    assert sum(each.end_s - each.start_s for each in lane.idle) == pytest.approx(sum(expected.values()), abs=0.05)


def test_a_step_waits_for_its_last_group() -> None:
    """It was in the queue for 1 s, generated for 2 s, and scored for 3 s."""
    own, spans = of_group(
        1, "0-1", (K.QUEUE, 100, 101), (K.LEASE, 101, 106), (K.GENERATE, 101, 103), (K.SCORE, 103, 106)
    )
    early, others = of_group(1, "0-2", (K.LEASE, 100.5, 102), (K.GENERATE, 101, 102))
    trainer = of_step(1, (K.TRAIN, 106, 109), (K.TRANSFER, 109, 110))
    found = lanes([*of_step(1, *STEP), *own, *early], trainer, a=[*spans, *others])
    close(found["trainer-1"], {IdleCause.QUEUE: 1.0, IdleCause.GENERATION: 2.0, IdleCause.REWARDS: 3.0})
    in_order = [idle.cause for idle in found["trainer-1"].idle]
    assert in_order == [IdleCause.QUEUE, IdleCause.GENERATION, IdleCause.REWARDS]
    after = {IdleCause.REWARDS: 3.0, IdleCause.TRAINER: 3.0, IdleCause.PUBLICATION: 1.0}
    close(found["a"], {IdleCause.QUEUE: 0.5, IdleCause.COORDINATION: 0.5, **after})


def test_one_replica_keeps_the_others_waiting() -> None:
    fast, of_a = of_group(1, "0-1", (K.LEASE, 100, 101), (K.GENERATE, 100, 101))
    slow, of_b = of_group(1, "0-2", (K.LEASE, 100, 106), (K.GENERATE, 100, 106))
    found = lanes([*of_step(1, *STEP), *fast, *slow], of_step(1, (K.TRAIN, 106, 109)), a=of_a, b=of_b)
    close(found["trainer-1"], {IdleCause.GENERATION: 1.0, IdleCause.LONG_TAIL: 5.0, IdleCause.PUBLICATION: 1.0})
    close(found["a"], {IdleCause.STALENESS_BOUND: 5.0, IdleCause.TRAINER: 3.0, IdleCause.PUBLICATION: 1.0})
    close(found["b"], {IdleCause.TRAINER: 3.0, IdleCause.PUBLICATION: 1.0})


def test_tools_are_the_environment() -> None:
    own, spans = of_group(1, "0-1", (K.LEASE, 100, 106), (K.GENERATE, 100, 102), (K.TOOL, 102, 106))
    found = lanes([*of_step(1, *STEP), *own], of_step(1, (K.TRAIN, 106, 109)), a=spans)
    close(found["trainer-1"], {IdleCause.GENERATION: 2.0, IdleCause.ENVIRONMENT: 4.0, IdleCause.PUBLICATION: 1.0})
    assert found["a"].kind is LaneKind.ENVIRONMENT or IdleCause.ENVIRONMENT in found["a"].idle_s


def test_without_spans_of_groups_the_wait_is_for_generation() -> None:
    found = lanes(of_step(1, *STEP), of_step(1, (K.TRAIN, 106, 109)))
    close(found["trainer-1"], {IdleCause.GENERATION: 6.0, IdleCause.PUBLICATION: 1.0})
