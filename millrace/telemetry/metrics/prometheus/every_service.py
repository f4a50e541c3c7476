"""Prometheus metrics of every service: the coordinator, the trainer's rank 0 and each replica."""

import platform
from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector

import millrace
from millrace.telemetry.metrics.declaration import Owner, Unit
from millrace.telemetry.metrics.prometheus.declaration import CALLS_S, counter, gauge, histogram

BUILD_INFO = gauge(
    "millrace_build_info",
    Unit.COUNT,
    "Always 1; its labels name the service, its release of millrace and of Python.",
    "service",
    "release",
    "python",
)
GRPC_S = histogram(
    "millrace_grpc_seconds",
    Unit.SECONDS,
    "Duration of gRPC calls that this service answered, by method and status code.",
    CALLS_S,
    "method",
    "code",
)
PROCESS_CPU_S = counter("process_cpu_seconds_total", Unit.SECONDS, "Time that this process spent on CPUs.")
PROCESS_START_S = gauge("process_start_time_seconds", Unit.SECONDS, "Unix time at which this process started.")
PROCESS_RESIDENT = gauge("process_resident_memory_bytes", Unit.BYTES, "Memory of the host that this process occupies.")
PROCESS_VIRTUAL = gauge("process_virtual_memory_bytes", Unit.BYTES, "Size of this process's address space.")
PROCESS_FILES = gauge("process_open_fds", Unit.COUNT, "File descriptors that this process has open.")
PROCESS_MOST_FILES = gauge("process_max_fds", Unit.COUNT, "File descriptors that this process may have open.")


def describe_process(registry: CollectorRegistry, service: Owner) -> None:
    """Adds the build of `service`, and the memory, CPU time and files of this process, to `registry`."""
    labels = {"service": service, "release": millrace.__version__, "python": platform.python_version()}
    BUILD_INFO.on(registry).labels(**labels).set(1)
    ProcessCollector(registry=registry)


def grpc_observer(registry: CollectorRegistry) -> Callable[[str, str, float], None]:
    """Records a call: path of its method, as `/millrace.v1.Fleet/Register`, name of its status code, seconds."""

    def observe(path: str, code: str, seconds: float) -> None:
        method = path.rpartition(".")[2]
        GRPC_S.on(registry).labels(method=method, code=code).observe(seconds)

    return observe
