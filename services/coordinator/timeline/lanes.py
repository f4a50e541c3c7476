"""Makes the timeline of some steps of a job from the batches of all services. Pure functions."""

import time
from collections.abc import Iterable, Mapping, Sequence

from millrace.ids import JobId
from millrace.rest.timeline import LaneView, SpanView, TimelineView
from millrace.telemetry.spans.batches import Batch
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span
from services.coordinator.timeline import idle
from services.coordinator.timeline.idle import Activity

LANES = {
    SpanKind.SCORE: LaneKind.REWARDS,
    SpanKind.ENVIRONMENT: LaneKind.ENVIRONMENT,
    SpanKind.TOOL: LaneKind.ENVIRONMENT,
}
"""Spans of a replica that have a lane of their own."""
ROOTS = (SpanKind.START, SpanKind.STEP)
"""The kinds of spans that say when a step began and ended."""
MOST_SPANS = 50_000
"""Spans in one answer."""
Window = tuple[float, float]
Lane = tuple[LaneKind, str]


def timeline(
    job_id: JobId,
    batches: Sequence[Batch],
    from_step: int,
    to_step: int,
    kept_from: int = 0,
    now_s: float = 0.0,
) -> TimelineView:
    """What the services did in the steps `from_step` to `to_step`. `now_s`: Unix time, the end of a step that is in
    progress; 0: now."""
    lanes = lanes_of(job_id, batches)
    start_s, end_s = window(lanes, from_step, to_step, now_s or time.time())
    steps = steps_of_groups(lanes)
    views: list[LaneView] = []
    dropped, room = sum(batch.dropped for batch in batches), MOST_SPANS
    for (kind, member), spans in sorted(lanes.items(), key=lambda lane: (list(LaneKind).index(lane[0][0]), lane[0][1])):
        seen = sorted((s for s in spans if s.end_s >= start_s and s.start_s <= end_s), key=lambda s: s.start_s)
        dropped += max(0, len(seen) - room)
        seen = seen[:room]
        room -= len(seen)
        if seen:
            views.append(LaneView(member=member, kind=kind, spans=[_view(span, steps) for span in seen]))
    _tell_idle(views, Activity.of(lanes, start_s, end_s, to_step - from_step + 1))
    return TimelineView(
        job_id=job_id,
        from_step=from_step,
        to_step=to_step,
        start_s=start_s,
        end_s=end_s,
        lanes=views,
        dropped_spans=dropped,
        kept_from_step=kept_from,
    )


def _tell_idle(views: Sequence[LaneView], activity: Activity) -> None:
    """Adds idle time to the lanes of trainer and replicas."""
    loop = idle.loop_causes(activity)
    for view in views:
        if view.kind is LaneKind.TRAINER:
            causes = idle.trainer_idle(activity, loop)
        elif view.kind is LaneKind.ROLLOUT:
            causes = idle.replica_idle(activity, view.member, loop)
        else:
            continue
        view.idle, view.idle_s = idle.intervals(activity, causes), idle.seconds(activity, causes)


def lanes_of(job_id: JobId, batches: Iterable[Batch]) -> dict[Lane, list[Span]]:
    """The job's spans by lane. A batch that was sent twice counts once."""
    lanes: dict[Lane, dict[str, Span]] = {}
    for batch in batches:
        for span in batch.spans:
            if span.context.job_id == job_id:
                kind = LANES.get(span.kind, batch.source) if batch.source is LaneKind.ROLLOUT else batch.source
                lanes.setdefault((kind, batch.member), {})[span.context.span_id] = span
    return {lane: list(spans.values()) for lane, spans in lanes.items()}


def window(lanes: Mapping[Lane, Sequence[Span]], from_step: int, to_step: int, now_s: float) -> Window:
    """When the first of the steps began and the last one ended. A step that was trained twice counts the last time."""
    roots: dict[int, Span] = {}
    for (kind, _), spans in lanes.items():
        for span in spans if kind is LaneKind.COORDINATOR else ():
            step = span.context.step
            if span.kind in ROOTS and (step not in roots or roots[step].end_s < span.end_s):
                roots[step] = span
    within = [root for step, root in roots.items() if from_step <= step <= to_step]
    before = [root.end_s for step, root in roots.items() if step < from_step]
    begun = [span.start_s for spans in lanes.values() for span in spans if span.context.step >= from_step]
    start_s = min((root.start_s for root in within), default=max(before, default=min(begun, default=now_s)))
    end_s = roots[to_step].end_s if to_step in roots else now_s
    return start_s, max(start_s, end_s)


def steps_of_groups(lanes: Mapping[Lane, Sequence[Span]]) -> dict[str, int]:
    """The step in which each group was trained, by the id of its trace."""
    return {
        span.context.trace_id: span.context.step
        for (kind, _), spans in lanes.items()
        if kind is LaneKind.COORDINATOR
        for span in spans
        if span.kind is SpanKind.GROUP
    }


def _view(span: Span, steps: Mapping[str, int]) -> SpanView:
    own = span.context
    known = own.step or not own.group
    return SpanView(
        kind=span.kind,
        start_s=span.start_s,
        end_s=span.end_s,
        step=own.step if known else steps.get(own.trace_id),
        group=own.group,
        detail=span.detail,
        attributes=dict(span.figures),
        trace_id=own.trace_id,
        span_id=own.span_id,
        parent_id=span.parent_id,
    )
