"""The timeline of a job of real services, from the submission to the last publication, and the diagnosis from it."""

from typing import Any

import pytest

from millrace.client import Client
from millrace.rest.timeline import LaneView, SpanView, TimelineView
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from tests.e2e.conftest import finished, until

OF_A_REPLICA = {SpanKind.LEASE, SpanKind.RENDER, SpanKind.GENERATE, SpanKind.COMPLETE}
OF_A_RECEIVER = {SpanKind.PREPARE, SpanKind.TRANSFER, SpanKind.VERIFY, SpanKind.COMMIT, SpanKind.PAUSE}
OF_THE_TRAINER = {SpanKind.TRAIN, SpanKind.FETCH, SpanKind.ASSESS, SpanKind.UPDATE, SpanKind.REPORT}


def lane(timeline: TimelineView, kind: LaneKind) -> LaneView:
    (found,) = [lane for lane in timeline.lanes if lane.kind is kind]
    return found


def kinds(spans: list[SpanView]) -> set[SpanKind]:
    return {span.kind for span in spans}


def test_every_service_tells_what_it_did(client: Client, job: dict[str, Any]) -> None:
    job["schedule"] |= {"steps": 2}
    job_id = finished(client, client.submit(job).id).id

    def whole() -> TimelineView | None:
        found = client.timeline(job_id, 0, 2)
        has_all = {lane.kind for lane in found.lanes} >= set(LaneKind) - {LaneKind.ENVIRONMENT}
        trained = has_all and sum(span.kind is SpanKind.TRAIN for span in lane(found, LaneKind.TRAINER).spans) == 2
        sent = has_all and sum(span.kind is SpanKind.PAUSE for span in lane(found, LaneKind.ROLLOUT).spans) == 3
        spans = [span for one in found.lanes for span in one.spans]
        steps = {span.trace_id for span in spans if span.kind is SpanKind.STEP}
        admitted = steps == {span.trace_id for span in spans if span.kind is SpanKind.ADMIT and span.trace_id in steps}
        return found if trained and sent and admitted else None

    timeline = until("the spans of all services", whole, 60.0)
    rollout, trainer = lane(timeline, LaneKind.ROLLOUT).spans, lane(timeline, LaneKind.TRAINER).spans
    coordinator = lane(timeline, LaneKind.COORDINATOR).spans
    assert kinds(rollout) >= OF_A_REPLICA | OF_A_RECEIVER | {SpanKind.CONFIGURE, SpanKind.ENGINE_QUEUE}
    assert kinds(trainer) >= OF_THE_TRAINER | {SpanKind.CONFIGURE, SpanKind.PREPARE, SpanKind.TRANSFER}
    assert kinds(lane(timeline, LaneKind.REWARDS).spans) == {SpanKind.SCORE}
    assert timeline.dropped_spans == 0
    found = client.diagnosis(job_id, 1, 2)
    assert found.from_spans and sum(found.loop_s.values()) == pytest.approx(found.step_s, rel=0.01)
    by_id = {span.span_id: span for one in timeline.lanes for span in one.spans}
    for root in [span for span in coordinator if span.kind is SpanKind.STEP]:
        within = [span for span in by_id.values() if span.trace_id == root.trace_id]
        assert kinds(within) >= OF_THE_TRAINER | OF_A_RECEIVER | {SpanKind.ADMIT, SpanKind.PUBLISH}
        assert {span.step for span in within} == {root.step}
        assert all(span.parent_id in by_id for span in within if span is not root)
    groups = [span for span in coordinator if span.kind is SpanKind.GROUP]
    assert len(groups) == 16
    for root in groups:
        within = [span for span in by_id.values() if span.trace_id == root.trace_id]
        assert kinds(within) >= OF_A_REPLICA | {SpanKind.QUEUE, SpanKind.SCORE, SpanKind.HOLD}
        assert sum(span.kind is SpanKind.GENERATE for span in within) == 4
        assert {span.step for span in within} == {root.step} and {span.group for span in within} == {root.group}
        (lease,) = [span for span in within if span.kind is SpanKind.LEASE]
        assert lease.parent_id == root.span_id and lease.attributes["samples"] == 4.0
        assert all(span.parent_id == lease.span_id for span in within if span.kind in OF_A_REPLICA - {SpanKind.LEASE})
