"""Why trainer and replicas are idle, and what the job's loop waits for: one cause for each instant.

A step waits for the last of its groups. What that group does meanwhile is the cause: it is generated, its environment
works, it is scored, or it is in the queue. Of a step that is in progress it is not known yet which group will be last;
then the last one that anything is known of counts.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.rest.timeline import IdleCause, IdleView
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span
from services.coordinator.timeline.activity import Activity

CAUSES = tuple(IdleCause)
CODES = {cause: code for code, cause in enumerate(CAUSES)}
Codes = NDArray[np.int8]
"""The cause of each cell, as its place in CAUSES; -1: there is none."""
Mask = NDArray[np.bool_]
TAIL = 0.5
"""Less than this part of the samples that the step's engines generated at most at once is its tail."""


def loop_causes(activity: Activity) -> Codes:
    """What the job's loop was at in each cell: TRAINER where the trainer trains, otherwise what it waited for."""
    causes = np.full(activity.cells, CODES[IdleCause.UNKNOWN], dtype=np.int8)

    def put(cause: IdleCause, where: Mask) -> None:
        causes[where & (causes == CODES[IdleCause.UNKNOWN])] = CODES[cause]

    trains = activity.of_kind(SpanKind.TRAIN, lane=LaneKind.TRAINER) > 0
    put(IdleCause.TRAINER, trains)
    put(IdleCause.STARTING, activity.stage(SpanKind.START))
    put(IdleCause.PUBLICATION, activity.stage(SpanKind.PUBLISH) & ~activity.stage(SpanKind.ADMIT, SpanKind.EVALUATE))
    put(IdleCause.EVALUATION, activity.stage(SpanKind.EVALUATE))
    put(IdleCause.CHECKPOINT, activity.stage(SpanKind.CHECKPOINT))
    for admit in _of_kind(activity, SpanKind.ADMIT):
        within = activity.counts([admit]) > 0
        for cause, where in _waits_of(activity, admit, within):
            put(cause, where & within)
        put(IdleCause.GENERATION, within)
    # Between two stages the coordinator reads and writes its ledger.
    put(IdleCause.COORDINATION, activity.stage(SpanKind.ISSUE, SpanKind.TRAIN, SpanKind.TRACK, SpanKind.STEP))
    return causes


def _of_kind(activity: Activity, kind: SpanKind) -> list[Span]:
    lanes = activity.lanes.items()
    return [s for (lane, _), spans in lanes if lane is LaneKind.COORDINATOR for s in spans if s.kind is kind]


def _waits_of(activity: Activity, admit: Span, within: Mask) -> list[tuple[IdleCause, Mask]]:
    """What the last group of the step that `admit` waits for does, by cause; the first that holds counts."""
    spans = _last_group(activity, admit)
    if spans is None:
        return []

    def busy(*kinds: SpanKind) -> Mask:
        return activity.counts(span for span in spans if span.kind in kinds) > 0

    generates, most = busy(SpanKind.GENERATE), int(activity.generating[within].max(initial=0))
    few = activity.generating < TAIL * most
    idle = activity.busy_replicas < len(activity.replicas)
    outside = ~busy(SpanKind.LEASE)
    return [
        (IdleCause.LONG_TAIL, generates & (few | idle)),
        (IdleCause.GENERATION, generates | busy(SpanKind.ENGINE_QUEUE)),
        (IdleCause.ENVIRONMENT, busy(SpanKind.ENVIRONMENT, SpanKind.TOOL)),
        (IdleCause.REWARDS, busy(SpanKind.SCORE)),
        (IdleCause.COORDINATION, busy(SpanKind.COMPLETE)),
        (IdleCause.QUEUE, outside & (activity.generating == 0) & busy(SpanKind.QUEUE)),
    ]


def _last_group(activity: Activity, admit: Span) -> list[Span] | None:
    """The spans of the group of the step that was complete last; None if nothing is known of one."""
    roots = [g for g in _of_kind(activity, SpanKind.GROUP) if g.context.step == admit.context.step]
    traces = {root.context.trace_id for root in roots}
    by_trace: dict[str, list[Span]] = {}
    for spans in activity.lanes.values():
        for span in spans:
            if span.context.group and (not traces or span.context.trace_id in traces):
                by_trace.setdefault(span.context.trace_id, []).append(span)
    ended = {
        trace: max((s.end_s for s in spans if s.kind is SpanKind.LEASE), default=0.0)
        for trace, spans in by_trace.items()
    }
    if not traces:
        ended = {trace: at for trace, at in ended.items() if admit.start_s <= at <= admit.end_s}
    if not any(ended.values()):
        return None
    return by_trace[max(ended, key=lambda trace: ended[trace])]


def trainer_idle(activity: Activity, loop: Codes) -> Codes:
    """Why the trainer is idle in each cell; -1 where it works. While it works for the loop, nothing is waited for."""
    causes = np.where(activity.training, np.int8(-1), loop)
    causes[causes == CODES[IdleCause.TRAINER]] = CODES[IdleCause.COORDINATION]
    return causes


def replica_idle(activity: Activity, member: str, loop: Codes) -> Codes:
    """Why a replica generates nothing in each cell; -1 where it generates."""
    kinds = (SpanKind.GENERATE, SpanKind.ENGINE_QUEUE)
    causes = np.full(activity.cells, CODES[IdleCause.UNKNOWN], dtype=np.int8)

    def own(*kinds: SpanKind, lane: LaneKind = LaneKind.ROLLOUT) -> Mask:
        where: Mask = activity.of_kind(*kinds, lane=lane, member=member) > 0
        return where

    def put(cause: IdleCause, where: Mask) -> None:
        causes[where & (causes == CODES[IdleCause.UNKNOWN])] = CODES[cause]

    put(IdleCause.PUBLICATION, own(SpanKind.PAUSE, SpanKind.COMMIT))
    put(IdleCause.STARTING, own(SpanKind.CONFIGURE) | activity.stage(SpanKind.START))
    put(IdleCause.ENVIRONMENT, own(SpanKind.ENVIRONMENT, SpanKind.TOOL, lane=LaneKind.ENVIRONMENT))
    # A replica without a lease has room for any prompt of the queue.
    put(IdleCause.QUEUE, activity.stage(SpanKind.QUEUE) & ~own(SpanKind.LEASE))
    put(IdleCause.TRAINER, activity.of_kind(SpanKind.TRAIN, lane=LaneKind.TRAINER) > 0)
    put(IdleCause.PUBLICATION, loop == CODES[IdleCause.PUBLICATION])
    put(IdleCause.STALENESS_BOUND, activity.generating > 0)
    scoring = activity.of_kind(SpanKind.SCORE, lane=LaneKind.REWARDS) > 0
    put(IdleCause.REWARDS, scoring)
    put(IdleCause.ENVIRONMENT, activity.of_kind(SpanKind.ENVIRONMENT, SpanKind.TOOL, lane=LaneKind.ENVIRONMENT) > 0)
    for cause in (IdleCause.EVALUATION, IdleCause.CHECKPOINT):
        put(cause, loop == CODES[cause])
    put(IdleCause.COORDINATION, activity.stage(SpanKind.ISSUE, SpanKind.TRAIN, SpanKind.ADMIT, SpanKind.TRACK))
    causes[own(*kinds)] = -1
    return causes


def intervals(activity: Activity, causes: Codes) -> list[IdleView]:
    """The cells of equal cause joined. Gaps of a single cell are no longer than the grid is fine, and left out."""
    edges: Sequence[int] = [0, *(np.flatnonzero(np.diff(causes)) + 1).tolist(), activity.cells]
    found: list[IdleView] = []
    for first, last in itertools.pairwise(edges):
        if causes[first] >= 0 and last - first > 1:
            start_s, end_s = (activity.start_s + edge * activity.cell_s for edge in (first, last))
            found.append(IdleView(start_s=start_s, end_s=end_s, cause=CAUSES[causes[first]]))
    return found


def seconds(activity: Activity, causes: Codes) -> dict[IdleCause, float]:
    """Seconds by cause."""
    counts = np.bincount(causes[causes >= 0], minlength=len(CAUSES))
    return {cause: float(n * activity.cell_s) for cause, n in zip(CAUSES, counts, strict=True) if n}
