"""Spans reach OpenTelemetry with the ids that the recorder chose."""

import subprocess
import sys

import pytest

from millrace.telemetry.spans import export
from millrace.telemetry.spans.recorder import Recorder


def test_without_an_endpoint_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in export.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    recorder = Recorder()
    assert export.configure("coordinator", recorder=recorder) is False
    assert recorder.export is None


EXPORTING = """
from opentelemetry.sdk.trace.export import BatchSpanProcessor
seen = []
BatchSpanProcessor.on_end = lambda self, span: seen.append(span)
from millrace.telemetry.spans import export
from millrace.telemetry.spans.context import TraceContext, within
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
assert export.configure("trainer", "trainer-1a2b3c4d")
root, other = TraceContext.of_step("job-1", 1, 3), TraceContext.new("job-1")
try:
    with within(root), RECORDER.span(SpanKind.TRAIN, detail="x") as opened:
        opened.figures["tokens"] = 5.0
        1 / 0
except ZeroDivisionError:
    pass
RECORDER.root(SpanKind.STEP, root, 100.0, 101.5, links=(other,))
with within(root.unsampled()), RECORDER.span(SpanKind.TRAIN):
    pass
train, step = seen
assert train.resource.attributes["service.name"] == "millrace-trainer"
assert train.resource.attributes["service.instance.id"] == "trainer-1a2b3c4d"
assert format(train.context.trace_id, "032x") == format(step.context.trace_id, "032x") == root.trace_id
assert format(step.context.span_id, "016x") == root.span_id and step.parent is None
assert format(train.context.span_id, "016x") == opened.context.span_id
assert train.parent.span_id == step.context.span_id
assert (train.name, train.attributes["millrace.tokens"], train.attributes["millrace.step"]) == ("train", 5.0, 3)
assert not train.status.is_ok and step.status.is_unset
assert (step.start_time, step.end_time) == (100 * 10**9, 1015 * 10**8)
assert format(step.links[0].context.trace_id, "032x") == other.trace_id
assert len(RECORDER.take(10)[0]) == 3
import os
os._exit(0)  # nobody listens at the endpoint
"""


def _exports(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", EXPORTING],
        env={"PYTHONPATH": ".", export.ENDPOINT: "http://127.0.0.1:9", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_have_the_ids_of_the_recorder(protocol: str) -> None:
    pytest.importorskip("opentelemetry.sdk")
    done = _exports(OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert done.returncode == 0, done.stderr


def test_the_sampler_of_the_environment_decides_for_new_traces() -> None:
    pytest.importorskip("opentelemetry.sdk")
    code = "\n".join(
        [
            "from millrace.telemetry.spans import export",
            "from millrace.telemetry.spans.recorder import RECORDER",
            "assert export.configure('coordinator')",
            "assert not RECORDER.sampled('f' * 32)",
            "import os; os._exit(0)",
        ]
    )
    environment = {"PYTHONPATH": ".", export.ENDPOINT: "http://127.0.0.1:9", "OTEL_TRACES_SAMPLER": "always_off"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
