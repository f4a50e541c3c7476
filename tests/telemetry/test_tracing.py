import subprocess
import sys

import pytest

from millrace.telemetry import tracing


def test_without_an_endpoint_spans_are_no_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    assert tracing.configure("coordinator") is False
    with tracing.tracer("test").start_as_current_span("step") as span:
        assert not span.is_recording()
        assert tracing.outgoing() == ()


EXPORTING = """
from millrace.telemetry import tracing
from opentelemetry import trace
assert tracing.configure("trainer", "trainer-1a2b3c4d")
with tracing.tracer("t").start_as_current_span("publication") as caller:
    assert caller.is_recording()
    assert caller.resource.attributes["service.name"] == "millrace-trainer"
    assert caller.resource.attributes["service.instance.id"] == "trainer-1a2b3c4d"
    carried = dict(tracing.outgoing())
with tracing.tracer("t").start_as_current_span("receive", context=tracing.incoming(carried)) as callee:
    assert callee.parent.span_id == caller.get_span_context().span_id
    assert callee.get_span_context().trace_id == caller.get_span_context().trace_id
import os
os._exit(0)  # nobody listens at the endpoint: the exporter's last attempt would only wait
"""


def test_with_an_endpoint_spans_are_recorded_and_cross_a_call() -> None:
    pytest.importorskip("opentelemetry.sdk")
    environment = {"PYTHONPATH": ".", tracing.ENDPOINT: "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", EXPORTING], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
