"""Traces over OpenTelemetry: on where OTEL_EXPORTER_OTLP_ENDPOINT is set, otherwise spans cost next to nothing.

The API package is always there; the SDK and the exporter come with the coordinator's extra. Everything else
(headers, sampling, resource attributes) is set by OpenTelemetry's own environment variables.
"""

import os
from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from millrace import __version__
from millrace.errors import MillraceError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def configure(service: str, member: str = "") -> bool:
    """Exports this process's spans if an endpoint is set; says whether it does.

    Raises MillraceError where an endpoint is set and the SDK or the exporter is not installed: traces that somebody
    asked for must not vanish without a word.
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
    """For spans: `with tracer(__name__).start_as_current_span("step", attributes={"millrace.job": job}): ...`."""
    return trace.get_tracer(module, __version__)


def outgoing() -> tuple[tuple[str, str], ...]:
    """The current span as call metadata, so that the callee's spans hang under it; empty outside any span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def incoming(metadata: Mapping[str, str]) -> Context:
    """The caller's span from call metadata: the `context` of `start_as_current_span`."""
    return propagate.extract(dict(metadata))
