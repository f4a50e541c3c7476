"""What spans cost: processor time to record and to pack one, bytes in Redis, and the time to make a timeline of many.

    python -m benchmarks.spans --replicas 200 --steps 10 --groups 400 --samples 8

Processor time of this process, so that neighbours hardly change it. Prints one JSON object.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace

from millrace.ids import JobId, MemberId
from millrace.telemetry.spans.batches import MOST_AT_ONCE, Batch, decode, encode
from millrace.telemetry.spans.context import TraceContext, within
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Recorder, Span
from services.coordinator.timeline.lanes import timeline

JOB = JobId("job-0123456789ab")
RECORDED = 50_000
STEP_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=400, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    options = parser.parse_args()
    made = batches(options)
    packed = [encode(batch) for batch in made]
    spans = sum(len(batch.spans) for batch in made)
    print(
        json.dumps(
            {
                "options": vars(options),
                **recording(),
                "spans": spans,
                "bytes_a_span": round(sum(map(len, packed)) / spans, 1),
                "read_s": round(seconds(lambda: [decode(data) for data in packed]), 2),
                "timeline_s": round(seconds(lambda: timeline(JOB, made, 1, options.steps)), 2),
            },
            indent=2,
        )
    )


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def recording() -> dict[str, float]:
    """Microseconds of one span."""
    recorder, root = Recorder(most_waiting=2 * RECORDED), TraceContext.new(JOB, group="0-1")

    def blocks() -> None:
        with within(root):
            for _ in range(RECORDED):
                with recorder.span(SpanKind.GENERATE):
                    pass

    def past() -> None:
        for _ in range(RECORDED):
            recorder.past(SpanKind.GENERATE, root, 1.0, 2.0, figures={"tokens": 1.0})

    def pack() -> None:
        while taken := recorder.take(MOST_AT_ONCE)[0]:
            encode(Batch(MemberId("rollout-1"), LaneKind.ROLLOUT, taken))

    costs = {"record_block_us": seconds(blocks) / RECORDED, "record_past_us": seconds(past) / RECORDED}
    costs["pack_us"] = seconds(pack) / (2 * RECORDED)
    return {name: round(1e6 * cost, 1) for name, cost in costs.items()}


def batches(options: argparse.Namespace) -> list[Batch]:
    """A job's spans: in each step every replica generates some groups, for 5 to 20 s each."""
    coordinator: list[Span] = []
    trainer: list[Span] = []
    replicas: list[list[Span]] = [[] for _ in range(options.replicas)]
    for step in range(1, options.steps + 1):
        root, began = TraceContext.of_step(JOB, 1, step), STEP_S * step
        coordinator.append(Span(SpanKind.STEP, root, "", began, began + STEP_S))
        for kind, start_s, end_s in (
            (SpanKind.ADMIT, 0.0, 20.0),
            (SpanKind.TRAIN, 20.0, 28.0),
            (SpanKind.PUBLISH, 28.0, STEP_S),
        ):
            span = Span(kind, root.child(), root.span_id, began + start_s, began + end_s)
            coordinator.append(span)
            if kind is SpanKind.TRAIN:
                trainer.append(span)
        for number in range(options.groups):
            group = TraceContext.new(JOB, group=f"{step}-{number}")
            coordinator.append(Span(SpanKind.GROUP, replace(group, step=step), "", began, began + 28.0))
            coordinator.append(Span(SpanKind.QUEUE, group.child(), group.span_id, began, began + 1.0))
            ends = began + random.uniform(5.0, 20.0)
            kinds = [SpanKind.LEASE, *[SpanKind.GENERATE] * options.samples]
            of_group = [Span(kind, group.child(), group.span_id, began + 1.0, ends) for kind in kinds]
            replicas[number % options.replicas] += of_group
    return [
        Batch(MemberId("coordinator"), LaneKind.COORDINATOR, coordinator),
        Batch(MemberId("trainer-1"), LaneKind.TRAINER, trainer),
        *(Batch(MemberId(f"rollout-{n}"), LaneKind.ROLLOUT, spans) for n, spans in enumerate(replicas)),
    ]


if __name__ == "__main__":
    main()
