"""Prometheus metrics of a replica: its engine and its leases."""

from prometheus_client import Gauge

from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import PrometheusMetric

ENGINE_RUNNING = PrometheusMetric(
    Gauge, "millrace_engine_running_samples", Unit.COUNT, "Samples that the engine generates now."
)
ENGINE_WAITING = PrometheusMetric(
    Gauge, "millrace_engine_waiting_samples", Unit.COUNT, "Samples that wait in the engine's queue."
)
ENGINE_CAPACITY = PrometheusMetric(
    Gauge,
    "millrace_engine_capacity_samples",
    Unit.COUNT,
    "Samples that the engine runs at once, by its settings and the size of its cache; 0 until it has started.",
)
LEASES_HELD = PrometheusMetric(Gauge, "millrace_leases_held", Unit.COUNT, "Prompts that the replica works on.")
DRAINING = PrometheusMetric(
    Gauge, "millrace_replica_draining", Unit.COUNT, "1 while the replica takes no new leases and finishes those it has."
)
