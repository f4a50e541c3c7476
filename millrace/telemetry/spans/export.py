"""Spans over OTLP to a collector, from every service, if OpenTelemetry's variables name one.

OpenTelemetry's own environment variables set everything: `OTEL_EXPORTER_OTLP_ENDPOINT` or its `_TRACES_` form switches
the export on, others set protocol, headers, sampling, resource attributes, and the size of the queue. Spans that do not
fit into the queue are dropped.
"""

import os
import threading
from typing import TYPE_CHECKING, Any

from millrace import __version__
from millrace.errors import MillraceError
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.recorder import RECORDER, Recorder, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENDPOINTS = (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
FLUSH_MS = 2000
"""How long the end of a process waits for the last spans to be sent, in milliseconds."""
_providers: list["TracerProvider"] = []


def configure(service: str, member: str = "", recorder: Recorder = RECORDER) -> bool:
    """Exports the spans of this process from now on if an endpoint is set. Returns whether one is.

    Raises MillraceError if an endpoint is set but the SDK or the exporter is not installed, because requested traces
    must not be lost silently.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    try:
        exporter = _exporter()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MillraceError(
            f"{ENDPOINT}: is set but traces cannot be exported: {error}.",
            "install the extra `tracing` of millrace, or unset it.",
        ) from error
    attributes = {"service.name": f"millrace-{service}", "service.version": __version__}
    resource = Resource.create(attributes | ({"service.instance.id": member} if member else {}))
    ids = _Ids()
    provider = TracerProvider(resource=resource, id_generator=ids.generator())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    recorder.export = _Export(provider, ids)
    recorder.sampled = lambda trace_id: _is_sampled(provider, trace_id)
    _providers.append(provider)
    return True


def flush() -> None:
    """Sends what waits; for a process that ends without Python's exit handlers."""
    for provider in _providers:
        provider.force_flush(FLUSH_MS)


def _exporter() -> Any:
    """The exporter of the protocol that the environment names; gRPC if it names none. Raises ImportError."""
    protocol = next((value for name in PROTOCOLS if (value := os.environ.get(name))), "grpc")
    if protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter()


def _is_sampled(provider: "TracerProvider", trace_id: str) -> bool:
    from opentelemetry.sdk.trace.sampling import Decision

    return provider.sampler.should_sample(None, int(trace_id, 16), "").decision is Decision.RECORD_AND_SAMPLE


class _Ids(threading.local):
    """The ids of the span that the calling thread exports now: OpenTelemetry asks a generator for them."""

    trace_id = 0
    span_id = 0

    def generator(self) -> Any:
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        ids = self

        class Given(IdGenerator):
            """Generates the ids that the recorder has chosen."""

            def generate_trace_id(self) -> int:
                return ids.trace_id

            def generate_span_id(self) -> int:
                return ids.span_id

        return Given()


class _Export:
    """Hands spans that have ended to OpenTelemetry."""

    def __init__(self, provider: "TracerProvider", ids: _Ids) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.status import Status, StatusCode

        self._api = trace
        self._failed = Status(StatusCode.ERROR)
        self._tracer = provider.get_tracer("millrace", __version__)
        self._ids = ids

    def __call__(self, span: Span) -> None:
        own = span.context
        self._ids.trace_id, self._ids.span_id = int(own.trace_id, 16), int(own.span_id, 16)
        about: dict[str, str | float] = {f"millrace.{name}": value for name, value in span.figures.items()}
        about |= {"millrace.job": own.job_id, "millrace.step": own.step}
        about |= {"millrace.group": own.group} if own.group else {}
        about |= {"millrace.detail": span.detail} if span.detail else {}
        parent = self._api.NonRecordingSpan(self._named(own, span.parent_id)) if span.parent_id else None
        begun = self._tracer.start_span(
            span.kind,
            context=self._api.set_span_in_context(parent) if parent is not None else _no_parent(),
            attributes=about,
            links=[self._api.Link(self._named(link, link.span_id)) for link in span.links],
            start_time=_nanoseconds(span.start_s),
        )
        if span.figures.get("failed"):
            begun.set_status(self._failed)
        begun.end(_nanoseconds(span.end_s))

    def _named(self, context: TraceContext, span_id: str) -> Any:
        """The span `span_id` of a trace, as OpenTelemetry names it."""
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED if context.sampled else self._api.TraceFlags.DEFAULT)
        return self._api.SpanContext(int(context.trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=flags)


def _no_parent() -> Any:
    from opentelemetry.context import Context

    return Context()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
