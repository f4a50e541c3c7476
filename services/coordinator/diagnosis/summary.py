"""Some steps of a job in a few numbers."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.rest import StepMetrics
from millrace.rest.timeline import IdleCause
from millrace.simulation.setting import Request
from millrace.spec.job import JobSpec
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span
from services.coordinator.diagnosis.forecast import Measured
from services.coordinator.timeline import idle
from services.coordinator.timeline.idle import Activity

IN_PLACE = "in_place"
"""Figure of a pause: 1 if the version was received during it."""


@dataclass(frozen=True)
class ReplicaPace:
    """How fast a replica generated."""

    member: str
    busy_s: float
    """Seconds in which it generated at least one sample."""
    token_s: float
    """Mean seconds of one token of a sample."""
    last_in_steps: int
    """Steps whose last group was its own."""


@dataclass(frozen=True)
class Summary:
    """What some steps of a job took, and what for."""

    steps: int
    seconds: float
    """The time that all the steps took together."""
    loop_s: Mapping[IdleCause, float]
    """Seconds by what the loop was at; they add up to `seconds`. TRAINER is training."""
    max_staleness: int
    replicas: Sequence[ReplicaPace] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the step metrics."""
    engine_queue_s: float = 0.0
    """Mean wait of a sample for a slot in its engine."""
    sample_s: float = 0.0
    """Mean seconds of a sample in the engine."""
    longest_sample_s: float = 0.0
    paused_for_lack_of_memory: int = 0
    """Publications that a replica received while it paused, for lack of spare memory."""
    token_budget: int = 0
    """Tokens of a micro-batch that the trainer was lowered to because memory ran out; 0: it was not."""
    measured: Measured | None = None
    """Lengths and rates, to simulate the job with other settings; None for episodes of several turns, whose tools and
    environments no simulation knows."""
    from_spans: bool = True

    @property
    def generating_s(self) -> float:
        """Seconds in which a replica generated, on average."""
        return statistics.fmean([replica.busy_s for replica in self.replicas]) if self.replicas else 0.0


def of_spans(
    activity: Activity, from_step: int, to_step: int, spec: JobSpec, rows: Sequence[StepMetrics], token_budget: int
) -> Summary:
    """The summary of the window of `activity`, which is that of the steps."""
    causes = idle.loop_causes(activity)
    samples = [s for s in _spans(activity, LaneKind.ROLLOUT) if s.kind is SpanKind.GENERATE and _within(s, activity)]
    waits = [s for s in _spans(activity, LaneKind.ROLLOUT) if s.kind is SpanKind.ENGINE_QUEUE and _within(s, activity)]
    durations = [span.end_s - span.start_s for span in samples]
    loop_s, metrics = idle.seconds(activity, causes), means(rows)
    return Summary(
        steps=to_step - from_step + 1,
        seconds=activity.end_s - activity.start_s,
        loop_s=loop_s,
        max_staleness=spec.schedule.max_staleness,
        replicas=_paces(activity, from_step, to_step),
        metrics=metrics,
        engine_queue_s=sum(s.end_s - s.start_s for s in waits) / max(1, len(samples)),
        sample_s=statistics.fmean(durations) if durations else 0.0,
        longest_sample_s=max(durations, default=0.0),
        paused_for_lack_of_memory=_in_place(activity) if spec.publication.commit == "auto" else 0,
        token_budget=token_budget,
        measured=_measured(activity, loop_s, to_step - from_step + 1, spec, metrics),
    )


BETWEEN = (IdleCause.EVALUATION, IdleCause.CHECKPOINT, IdleCause.COORDINATION)
"""What the job's loop does beside waiting, training and publishing."""


def _measured(
    activity: Activity, loop_s: Mapping[IdleCause, float], steps: int, spec: JobSpec, metrics: Mapping[str, float]
) -> Measured | None:
    if spec.rollout.environment is not None or spec.rollout.agent is not None:
        return None
    requests = [
        Request(member, span.start_s, span.end_s, span.figures.get("tokens", 0.0))
        for (lane, member), spans in activity.lanes.items()
        if lane is LaneKind.ROLLOUT
        for span in spans
        if span.kind is SpanKind.GENERATE and _within(span, activity)
    ]
    spans = _spans(activity, LaneKind.ROLLOUT)
    pauses = [s.end_s - s.start_s for s in spans if s.kind is SpanKind.PAUSE and _within(s, activity)]
    slots = max((s.figures.get("capacity", 0.0) for s in spans if s.kind is SpanKind.LEASE), default=0.0)
    between_s = sum(loop_s.get(cause, 0.0) for cause in BETWEEN) / max(1, steps)
    pause_s = statistics.fmean(pauses) if pauses else 0.0
    return Measured.of(requests, int(slots), metrics, pause_s=pause_s, between_s=between_s)


def of_metrics(spec: JobSpec, rows: Sequence[StepMetrics], token_budget: int) -> Summary:
    """The summary of steps whose spans are not kept. What a step waited for is guessed from the durations of its
    groups: scoring counts for as much of the wait as it is longer than generation."""
    values = means(rows)
    train, publish = values.get("timing_s/train", 0.0), values.get("timing_s/update_weights", 0.0)
    wait, generate = values.get("timing_s/gen", 0.0), values.get("timing_s/generate/max", 0.0)
    score, tools = values.get("timing_s/score/max", 0.0), values.get("timing_s/tools/max", 0.0)
    parts = {IdleCause.GENERATION: max(0.0, generate - tools), IdleCause.REWARDS: score, IdleCause.ENVIRONMENT: tools}
    whole = sum(parts.values()) or 1.0
    loop = {cause: wait * part / whole for cause, part in parts.items()}
    if not any(loop.values()):
        loop[IdleCause.GENERATION] = wait
    loop |= {IdleCause.TRAINER: train, IdleCause.PUBLICATION: publish}
    return Summary(
        steps=len(rows),
        seconds=sum(loop.values()) * len(rows),
        loop_s={cause: seconds * len(rows) for cause, seconds in loop.items() if seconds},
        max_staleness=spec.schedule.max_staleness,
        metrics=values,
        token_budget=token_budget,
        from_spans=False,
    )


def means(rows: Sequence[StepMetrics]) -> dict[str, float]:
    """The mean of each metric over the rows that have it."""
    names = {name for row in rows for name in row.values}
    return {name: statistics.fmean([r.values[name] for r in rows if name in r.values]) for name in sorted(names)}


def _spans(activity: Activity, lane: LaneKind) -> list[Span]:
    return [span for (kind, _), spans in activity.lanes.items() if kind is lane for span in spans]


def _within(span: Span, activity: Activity) -> bool:
    return span.end_s >= activity.start_s and span.start_s <= activity.end_s


def _in_place(activity: Activity) -> int:
    pauses = [s for s in _spans(activity, LaneKind.ROLLOUT) if s.kind is SpanKind.PAUSE and _within(s, activity)]
    return sum(span.figures.get(IN_PLACE) == 1.0 for span in pauses)


def _paces(activity: Activity, from_step: int, to_step: int) -> list[ReplicaPace]:
    last = _last_members(activity, from_step, to_step)
    paces = []
    for (kind, member), spans in activity.lanes.items():
        samples = [s for s in spans if s.kind is SpanKind.GENERATE and _within(s, activity)]
        if kind is LaneKind.ROLLOUT and samples:
            tokens = sum(span.figures.get("tokens", 0.0) for span in samples) or float(len(samples))
            token_s = sum(span.end_s - span.start_s for span in samples) / tokens
            busy_s = float((activity.counts(samples) > 0).sum()) * activity.cell_s
            paces.append(ReplicaPace(member, busy_s, token_s, last[member]))
    return sorted(paces, key=lambda pace: pace.member)


def _last_members(activity: Activity, from_step: int, to_step: int) -> Counter[str]:
    """The number of steps whose last group each replica generated."""
    roots = [span for span in _spans(activity, LaneKind.COORDINATOR) if span.kind is SpanKind.GROUP]
    steps = {root.context.trace_id: root.context.step for root in roots}
    newest: dict[int, tuple[float, str]] = {}
    for (kind, member), spans in activity.lanes.items():
        for span in spans if kind is LaneKind.ROLLOUT else ():
            step = steps.get(span.context.trace_id, -1)
            if span.kind is SpanKind.LEASE and from_step <= step <= to_step:
                newest[step] = max(newest.get(step, (0.0, "")), (span.end_s, member))
    return Counter(member for _, member in newest.values())
