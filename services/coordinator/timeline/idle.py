"""Who was busy with what at each instant of a window, by spans on a grid of equal cells; and why trainer and replicas
were idle: one cause for each instant.

A step waits for the last of its groups. What that group does meanwhile is the cause: it is generated, its environment
works, it is scored, or it is in the queue. Of a step that is in progress it is not known yet which group will be last;
then the last one that anything is known of counts.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from millrace.rest.timeline import IdleCause, IdleView
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span

CELLS_OF_A_STEP = 4000
MOST_CELLS = 20_000
WORK_OF_A_TRAINER = (SpanKind.TRAIN, SpanKind.PREPARE, SpanKind.TRANSFER, SpanKind.CONFIGURE, SpanKind.CHECKPOINT)
WORK_OF_AN_ENGINE = (SpanKind.GENERATE,)
Counts = NDArray[np.int32]
"""Number of spans in each cell."""
Lane = tuple[LaneKind, str]


@dataclass(frozen=True)
class Activity:
    """The spans of a window on a grid."""

    lanes: Mapping[Lane, Sequence[Span]]
    start_s: float
    end_s: float
    cells: int
    _known: dict[tuple[tuple[SpanKind, ...], LaneKind, str], Counts] = field(default_factory=dict, repr=False)
    """What `of_kind` has counted before: every replica asks for the same stages."""

    @classmethod
    def of(cls, lanes: Mapping[Lane, Sequence[Span]], start_s: float, end_s: float, steps: int = 1) -> "Activity":
        """The grid of a window over `steps` steps."""
        return cls(lanes, start_s, end_s, min(MOST_CELLS, CELLS_OF_A_STEP * max(1, steps)))

    @property
    def cell_s(self) -> float:
        """Seconds of one cell."""
        return max(self.end_s - self.start_s, 1e-9) / self.cells

    def counts(self, spans: Iterable[Span]) -> Counts:
        """How many of the spans each cell lies in: a cell belongs to a span that covers its middle."""
        times = np.array([(span.start_s, span.end_s) for span in spans], dtype=np.float64).reshape(-1, 2)
        edges = np.clip(np.rint((times - self.start_s) / self.cell_s), 0, self.cells).astype(np.int64)
        changes = np.zeros(self.cells + 1, dtype=np.int64)
        np.add.at(changes, edges[:, 0], 1)
        np.add.at(changes, edges[:, 1], -1)
        counts: Counts = np.cumsum(changes[:-1]).astype(np.int32)
        return counts

    def of_kind(self, *kinds: SpanKind, lane: LaneKind, member: str = "") -> Counts:
        """The spans of these kinds in the lanes of a kind, of all members or of one."""
        key = (kinds, lane, member)
        if key not in self._known:
            self._known[key] = self.counts(
                span
                for (kind, name), spans in self.lanes.items()
                if kind is lane and (not member or name == member)
                for span in spans
                if span.kind in kinds
            )
        return self._known[key]

    @cached_property
    def replicas(self) -> list[str]:
        """The replicas that have spans."""
        return sorted(name for kind, name in self.lanes if kind is LaneKind.ROLLOUT)

    @cached_property
    def generating(self) -> Counts:
        """Samples that are generated, in all replicas."""
        return self.of_kind(*WORK_OF_AN_ENGINE, lane=LaneKind.ROLLOUT)

    @cached_property
    def busy_replicas(self) -> Counts:
        """Replicas that generate."""
        busy = [self.of_kind(*WORK_OF_AN_ENGINE, lane=LaneKind.ROLLOUT, member=name) > 0 for name in self.replicas]
        return np.sum(busy, axis=0, dtype=np.int32) if busy else np.zeros(self.cells, dtype=np.int32)

    @cached_property
    def training(self) -> NDArray[np.bool_]:
        """The instants at which the trainer works on something for the job."""
        trained: NDArray[np.bool_] = self.of_kind(*WORK_OF_A_TRAINER, lane=LaneKind.TRAINER) > 0
        return trained

    def stage(self, *kinds: SpanKind) -> NDArray[np.bool_]:
        """The instants at which the coordinator is in one of these stages."""
        where: NDArray[np.bool_] = self.of_kind(*kinds, lane=LaneKind.COORDINATOR) > 0
        return where


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
    put = partial(_put, causes)
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


def _put(causes: Codes, cause: IdleCause, where: Mask) -> None:
    """Gives the cells of `where` that have no cause yet this one."""
    causes[where & (causes == CODES[IdleCause.UNKNOWN])] = CODES[cause]


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
    put = partial(_put, causes)

    def own(*kinds: SpanKind, lane: LaneKind = LaneKind.ROLLOUT) -> Mask:
        where: Mask = activity.of_kind(*kinds, lane=lane, member=member) > 0
        return where

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
