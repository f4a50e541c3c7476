"""The timeline of jobs with simulated peers: the coordinator's own spans, and those that members send."""

import asyncio
import itertools
from typing import Any

import pytest

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import NotFound
from millrace.ids import MemberId
from millrace.rest.timeline import TimelineView
from millrace.telemetry.spans.batches import Batch, encode
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Recorder, Span
from services.coordinator.observe import span_store
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.store import Store
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.redis import a_job, lead


def lane(timeline: TimelineView, kind: LaneKind) -> dict[SpanKind, list[Any]]:
    spans: dict[SpanKind, list[Any]] = {}
    for one in timeline.lanes:
        for span in one.spans if one.kind is kind else []:
            spans.setdefault(span.kind, []).append(span)
    return spans


@scenario
async def test_the_stages_of_every_step_follow_each_other(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(step_s=0.05), await cluster.replica(seconds=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_store, "EVERY_S", 1.0)  # later than the steps, so that spans are kept at later steps
        job_id = await cluster.submit(spec)
        await cluster.ended(job_id)
    client = cluster.coordinator.client

    async def whole() -> TimelineView:
        return await asyncio.to_thread(client.timeline, job_id, 0, 6)

    timeline = await until(whole, lambda found: len(lane(found, LaneKind.COORDINATOR).get(SpanKind.STEP, [])) == 6)
    spans = lane(timeline, LaneKind.COORDINATOR)
    roots = spans[SpanKind.STEP]
    assert [root.step for root in roots] == [1, 2, 3, 4, 5, 6]
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(roots))
    (start,) = spans[SpanKind.START]
    assert start.end_s == roots[0].start_s and timeline.start_s == start.start_s
    assert spans[SpanKind.SUBMIT][0].trace_id == spans[SpanKind.JOB_QUEUE][0].trace_id == start.trace_id
    for root in roots:
        (train,) = [span for span in spans[SpanKind.TRAIN] if span.step == root.step]
        (mark,) = [span for span in spans[SpanKind.MARK] if span.step == root.step]
        assert train.trace_id == root.trace_id and train.parent_id == root.span_id and mark.parent_id == train.span_id
        assert root.start_s <= train.start_s <= mark.start_s <= mark.end_s <= root.end_s
        assert train.end_s - train.start_s > 0.05
        groups = [span for span in spans[SpanKind.GROUP] if span.step == root.step and not span.group.startswith("e")]
        assert len(groups) == 4
        for group in groups:
            (queued,) = [span for span in spans[SpanKind.QUEUE] if span.trace_id == group.trace_id]
            assert queued.step == root.step and queued.parent_id == group.span_id
            assert group.start_s == queued.start_s and group.end_s >= train.start_s
    one = await asyncio.to_thread(client.timeline, job_id, 3, 3)
    assert one.start_s == roots[2].start_s and one.end_s >= roots[2].end_s, "what belongs to a step may end after it"
    newest = await asyncio.to_thread(client.timeline, job_id)
    assert (newest.from_step, newest.to_step) == (6, 6)
    with pytest.raises(NotFound):
        await asyncio.to_thread(client.timeline, "job-000000000000")


def test_spans_of_steps_that_ended_unseen_are_kept_under_them(empty_redis_url: str) -> None:
    """The job was last seen running in step 2; it has ended when the spans of step 3 are stored."""

    async def kept() -> list[bytes]:
        store, recorder = Store(empty_redis_url), Recorder()
        await lead(store)
        job = a_job().id
        seen = [(job, 2), None]
        spans = span_store.SpanStore(store, PrometheusMetrics(), lambda partition: seen.pop(0), recorder)
        await spans.flush()
        recorder.add(Span(SpanKind.STEP, TraceContext.of_step(job, 0, 3), "", 1.0, 2.0))
        await spans.flush()
        try:
            return await store.records(job).spans(3, 3)
        finally:
            await store.close()

    assert len(asyncio.run(kept())) == 1


@scenario
async def test_members_send_spans_with_their_heartbeats(cluster: Cluster, spec: dict[str, Any]) -> None:
    """What is no batch, or is too large, is not kept, and harms nobody."""
    await cluster.trainer(), await cluster.replica(seconds=0.3)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    replica = cluster.members[1]
    now = (await cluster.events(job_id))[-1].time_s
    root = TraceContext.new(job_id, group="0-5")
    spans = [
        Span(SpanKind.LEASE, root, "", now, now + 0.2, figures={"tokens": 9.0}),
        Span(SpanKind.SCORE, root.child(), root.span_id, now + 0.1, now + 0.2, "exact"),
        Span(SpanKind.LEASE, TraceContext.new("job-ffffffffffff"), "", now, now + 0.1),
    ]
    whole = encode(Batch(MemberId(replica.id), LaneKind.ROLLOUT, spans, dropped=3))
    for data in (whole, whole, b"no batch", b"x" * (1 << 20)):  # the same twice: a heartbeat that was repeated
        beat = fleet_pb2.HeartbeatRequest(member_id=replica.id, version=replica.version, spans=data, span_count=5)
        await replica.coordinator.call(FleetRpc.Heartbeat, beat)
    await cluster.ended(job_id)
    client = cluster.coordinator.client

    async def seen() -> TimelineView:
        return await asyncio.to_thread(client.timeline, job_id, 0, 6)

    timeline = await until(seen, lambda found: lane(found, LaneKind.ROLLOUT))
    (lease,) = lane(timeline, LaneKind.ROLLOUT)[SpanKind.LEASE]
    (score,) = lane(timeline, LaneKind.REWARDS)[SpanKind.SCORE]
    assert lease.attributes == {"tokens": 9.0} and (lease.group, lease.trace_id) == ("0-5", root.trace_id)
    assert (score.detail, score.parent_id) == ("exact", root.span_id)
    assert timeline.dropped_spans == 3
    page = cluster.coordinator.client._connection().get("/metrics").text
    assert "millrace_spans_dropped_total 5.0" in page
