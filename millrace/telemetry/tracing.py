"""Traces with OpenTelemetry. They are exported where OTEL_EXPORTER_OTLP_ENDPOINT is set; otherwise spans cost little.

The API package is always installed; the SDK and the exporter come with the coordinator's extra. OpenTelemetry's own
environment variables set everything else, such as headers, sampling and resource attributes.
"""

import os
from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from millrace import __version__
from millrace.errors import MillraceError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def configure(service: str, member: str = "") -> bool:
    """Starts to export the spans of this process if an endpoint is set. Returns whether one is.

    Raises MillraceError where an endpoint is set but the SDK or the exporter is not installed, because requested traces
    must not be lost silently.
    """
    if not os.environ.get(ENDPOINT):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MillraceError(
            f"{ENDPOINT} is set but traces cannot be exported: {error}.",
            "install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc, or unset it.",
        ) from error
    attributes = {"service.name": f"millrace-{service}", "service.version": __version__}
    resource = Resource.create(attributes | ({"service.instance.id": member} if member else {}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def tracer(module: str) -> trace.Tracer:
    """A tracer: `with tracer(__name__).start_as_current_span("step", attributes={"millrace.job": job}): ...`."""
    return trace.get_tracer(module, __version__)


def outgoing() -> tuple[tuple[str, str], ...]:
    """The current span as metadata of a call, which makes it the parent of the callee's spans; empty without a span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def incoming(metadata: Mapping[str, str]) -> Context:
    """The caller's span from the metadata of a call, for the argument `context` of `start_as_current_span`."""
    return propagate.extract(dict(metadata))
