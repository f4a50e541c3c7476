"""Recording, the bound, and what crosses a call."""

import asyncio
import threading

import pytest

from millrace.ids import MemberId
from millrace.telemetry.spans.batches import LARGEST_BYTES, MOST_AT_ONCE, Batch, decode, encode
from millrace.telemetry.spans.context import TraceContext, current, incoming, outgoing, within
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Recorder, Span
from services.coordinator.observe.span_store import LARGEST_BATCH

ROOT = TraceContext.of_step("job-0123456789ab", 1, 3)


def test_a_span_within_a_span_names_it_as_its_parent() -> None:
    recorder = Recorder()
    with within(ROOT), recorder.span(SpanKind.TRAIN) as whole, recorder.span(SpanKind.FETCH, detail="groups") as part:
        part.figures["groups"] = 4.0
    (fetch, train), dropped = recorder.take(10)
    assert (train.kind, train.parent_id, train.context) == (SpanKind.TRAIN, ROOT.span_id, whole.context)
    assert (fetch.parent_id, fetch.detail, fetch.figures) == (whole.context.span_id, "groups", {"groups": 4.0})
    assert train.start_s <= fetch.start_s and fetch.end_s <= train.end_s + 0.001
    assert (fetch.context.trace_id, fetch.context.step, dropped) == (ROOT.trace_id, 3, 0)
    assert current() is None


def test_an_error_is_told_and_passes() -> None:
    recorder = Recorder()
    with within(ROOT), pytest.raises(ValueError), recorder.span(SpanKind.SCORE):
        raise ValueError
    assert recorder.take(1)[0][0].figures == {"failed": 1.0}


def test_nothing_is_recorded_without_a_context_or_when_switched_off() -> None:
    recorder = Recorder()
    with recorder.span(SpanKind.GENERATE) as span:
        span.figures["tokens"] = 1.0
    recorder.past(SpanKind.GENERATE, None, 1.0, 2.0)
    off = Recorder(enabled=False)
    with within(ROOT), off.span(SpanKind.GENERATE):
        pass
    off.root(SpanKind.STEP, ROOT, 1.0, 2.0)
    assert recorder.take(10) == off.take(10) == ([], 0)


def test_what_does_not_fit_is_counted_and_never_waits() -> None:
    recorder = Recorder(most_waiting=5)
    threads = [threading.Thread(target=lambda: [_add(recorder) for _ in range(100)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, dropped = recorder.take(3)
    rest, none = recorder.take(10)
    assert len(first) == 3 and 2 <= len(rest) <= 5  # threads may pass the bound together, once each
    assert dropped == 300 - len(first) - len(rest) and none == 0


def _add(recorder: Recorder) -> None:
    recorder.past(SpanKind.GENERATE, ROOT, 1.0, 2.0)


def test_a_call_carries_trace_job_and_step() -> None:
    with within(ROOT):
        assert incoming(dict(outgoing())) == ROOT
    assert outgoing() == ()
    assert TraceContext.parse(ROOT.unsampled().traceparent) == TraceContext(ROOT.trace_id, ROOT.span_id, False)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"traceparent": "nothing"},
        {"traceparent": b"00-" + b"0" * 32},
        {"traceparent": "00-" + "G" * 32 + "-" + "0" * 16 + "-01"},
    ],
)
def test_metadata_that_names_no_span(metadata: dict[str, str | bytes]) -> None:
    assert incoming(metadata) is None


def test_baggage_of_others_does_no_harm() -> None:
    context = incoming({"traceparent": ROOT.traceparent, "baggage": "a=b, millrace.step=x,millrace.job=" + "j" * 500})
    assert context is not None and context.step == 0 and len(context.job_id) == 100


def test_tasks_inherit_the_span_in_which_they_begin() -> None:
    async def look() -> TraceContext | None:
        return current()

    async def main() -> TraceContext | None:
        with within(ROOT):
            task = asyncio.create_task(look())
        return await task

    assert asyncio.run(main()) == ROOT


def test_a_batch_comes_back_as_it_was() -> None:
    spans = [
        Span(SpanKind.TOOL, ROOT.child(), ROOT.span_id, 100.0, 101.5, "search", {"tokens": 3.0}),
        Span(SpanKind.STEP, ROOT, "", 99.0, 102.0),
    ]
    batch = Batch(MemberId("rollout-1"), LaneKind.ROLLOUT, spans, dropped=7)
    data = encode(batch)
    assert decode(data) == batch
    many = encode(Batch(MemberId("m"), LaneKind.TRAINER, [_sample(n) for n in range(MOST_AT_ONCE)]))
    assert len(many) / MOST_AT_ONCE < 60
    assert len(many) < LARGEST_BATCH and len(decode(many).spans) == MOST_AT_ONCE


def _sample(number: int) -> Span:
    group = TraceContext.new("job-0123456789ab", group=f"0-{number // 8}")
    return Span(SpanKind.GENERATE, group, "ab" * 8, 1.7e9 + number, 1.7e9 + number + 0.33, figures={"tokens": 431.0})


@pytest.mark.parametrize("data", [b"", b"no zlib", encode(Batch(MemberId("m"), LaneKind.TRAINER, []))[:-5]])
def test_bytes_that_are_no_batch(data: bytes) -> None:
    found = decode(data)
    assert found is None or found.spans == []


def test_a_batch_that_would_fill_the_memory_is_not_read() -> None:
    import zlib

    assert decode(zlib.compress(b"\0" * (LARGEST_BYTES + 1))) is None
