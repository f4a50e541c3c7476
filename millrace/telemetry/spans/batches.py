"""Spans as compact batches: what members send to the coordinator, and what it keeps. About 20 bytes a span."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from millrace.contracts.v1 import spans_pb2
from millrace.ids import MemberId
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Recorder, Span

KIND_NUMBERS = {kind: getattr(spans_pb2, f"SPAN_KIND_{kind.name}") for kind in SpanKind}
KINDS = {number: kind for kind, number in KIND_NUMBERS.items()}
SOURCES = {
    spans_pb2.SPAN_SOURCE_COORDINATOR: LaneKind.COORDINATOR,
    spans_pb2.SPAN_SOURCE_TRAINER: LaneKind.TRAINER,
    spans_pb2.SPAN_SOURCE_ROLLOUT: LaneKind.ROLLOUT,
}
SOURCE_NUMBERS = {source: number for number, source in SOURCES.items()}
MOST_AT_ONCE = 4000
"""Spans in a batch."""
LARGEST_BYTES = 2 << 20
"""Largest batch, uncompressed. A larger one is not read."""


@dataclass(frozen=True)
class Batch:
    """Spans of one service."""

    member: MemberId
    source: LaneKind
    spans: Sequence[Span]
    dropped: int = 0


def taken(recorder: Recorder, member: MemberId, source: LaneKind) -> tuple[bytes, int]:
    """The spans that wait in `recorder`, at most MOST_AT_ONCE, encoded, and their number; nothing if none wait."""
    spans, dropped = recorder.take(MOST_AT_ONCE)
    return (encode(Batch(member, source, spans, dropped)), len(spans)) if spans or dropped else (b"", 0)


def encode(batch: Batch) -> bytes:
    """The batch as a compressed SpanBatch."""
    message = spans_pb2.SpanBatch(
        member_id=batch.member,
        source=SOURCE_NUMBERS[batch.source],
        dropped=batch.dropped,
        spans=[_message(span) for span in batch.spans],
    )
    return zlib.compress(message.SerializeToString(), level=1)


def _message(span: Span) -> spans_pb2.Span:
    context = span.context
    return spans_pb2.Span(
        kind=KIND_NUMBERS[span.kind],
        trace_id=bytes.fromhex(context.trace_id),
        span_id=int(context.span_id, 16),
        parent_id=int(span.parent_id or "0", 16),
        start_s=span.start_s,
        seconds=span.end_s - span.start_s,
        job_id=context.job_id,
        step=context.step,
        group=context.group,
        detail=span.detail,
        figures=span.figures,
    )


def decode(data: bytes) -> Batch | None:
    """The batch that `encode` was given, without spans of kinds that this release does not know; None if the bytes
    are no batch, or too large."""
    try:
        reader = zlib.decompressobj()
        message = spans_pb2.SpanBatch.FromString(reader.decompress(data, LARGEST_BYTES))
    except (zlib.error, DecodeError):
        return None
    if reader.unconsumed_tail or message.source not in SOURCES:
        return None
    spans = [_span(each) for each in message.spans if each.kind in KINDS]
    return Batch(MemberId(message.member_id), SOURCES[message.source], spans, message.dropped)


def _span(message: spans_pb2.Span) -> Span:
    context = TraceContext(
        message.trace_id.hex(), f"{message.span_id:016x}", True, message.job_id, message.step, message.group
    )
    return Span(
        KINDS[message.kind],
        context,
        f"{message.parent_id:016x}" if message.parent_id else "",
        message.start_s,
        message.start_s + message.seconds,
        message.detail,
        dict(message.figures),
    )
