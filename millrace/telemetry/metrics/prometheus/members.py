"""Prometheus metrics of trainer and replicas: each member's own part in publications, and the GPUs that it uses.

GPUs are measured by NVML if the package `nvidia-ml-py` is installed, which the engines' GPU builds bring. A replica
reports the GPUs that it may use on its own host, the trainer the GPU of each rank.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from millrace.contracts.v1 import weights_pb2
from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import PUBLICATION_BUCKETS_S, counter, gauge, histogram
from millrace.telemetry.usage import GpuReading

MEMBER_INFO = gauge(
    "millrace_member_info",
    Unit.COUNT,
    "Always 1; its labels name the member, its engine or torch, and the job that it works on.",
    "member",
    "engine",
    "engine_release",
    "job_id",
)
MEMBER_VERSION = gauge(
    "millrace_member_version", Unit.VERSIONS, "Version of the weights that the member holds; -1 if it holds none."
)
MEMBER_TOKENS = counter(
    "millrace_member_tokens_total",
    Unit.TOKENS,
    "Response tokens that the replica generated, or that the trainer trained.",
)
MEMBER_PUBLICATION_S = histogram(
    "millrace_member_publication_seconds",
    Unit.SECONDS,
    "Time of this member in a publication by phase: prepare, gather, wire, verify, apply, and the pause of generation.",
    PUBLICATION_BUCKETS_S,
    "phase",
)
MEMBER_PUBLICATION_BYTES = counter(
    "millrace_member_publication_bytes_total",
    Unit.BYTES,
    "Bytes of weights that this member sent or received in publications.",
)
GPU_LABELS = ("gpu", "host")
GPU_BUSY = gauge(
    "millrace_gpu_busy_ratio",
    Unit.SHARE,
    "Part of the last moment, up to a second, in which the GPU ran a kernel.",
    *GPU_LABELS,
)
GPU_MEMORY_USED = gauge(
    "millrace_gpu_memory_used_bytes", Unit.BYTES, "Memory of the GPU that all processes together use.", *GPU_LABELS
)
GPU_MEMORY_SIZE = gauge("millrace_gpu_memory_size_bytes", Unit.BYTES, "Memory of the GPU.", *GPU_LABELS)
GPU_POWER = gauge("millrace_gpu_power_watts", Unit.WATTS, "Power that the GPU draws.", *GPU_LABELS)
GPU_TEMPERATURE = gauge("millrace_gpu_temperature_celsius", Unit.CELSIUS, "Temperature of the GPU.", *GPU_LABELS)
SENDER_PHASES = ("prepare", "gather", "wire", "verify")
RECEIVER_PHASES = ("prepare", "wire", "verify", "apply", "pause")


def record_publication(registry: CollectorRegistry, report: weights_pb2.MemberReport, phases: tuple[str, ...]) -> None:
    """Records a member's part in a publication: its seconds in each of `phases`, and its bytes."""
    for phase in phases:
        MEMBER_PUBLICATION_S.on(registry).labels(phase=phase).observe(getattr(report, f"{phase}_s"))
    MEMBER_PUBLICATION_BYTES.on(registry).inc(report.bytes)


def describe_member(
    registry: CollectorRegistry, *, member: str, engine: str, engine_release: str, job_id: str, version: int | None
) -> None:
    """Sets who this member is, what it works on (empty: no job), and the version that it holds (None: none)."""
    info = MEMBER_INFO.on(registry)
    info.clear()
    info.labels(member=member, engine=engine, engine_release=engine_release, job_id=job_id).set(1)
    MEMBER_VERSION.on(registry).set(-1 if version is None else version)


def describe_gpus(registry: CollectorRegistry, readings: Iterable[tuple[str, GpuReading]]) -> None:
    """Sets what GPUs do: readings with the host of each. A figure that a GPU does not report has no series."""
    every = (GPU_BUSY, GPU_MEMORY_USED, GPU_MEMORY_SIZE, GPU_POWER, GPU_TEMPERATURE)
    for metric in every:
        metric.on(registry).clear()
    for host, one in readings:
        values = (one.busy, one.used_bytes, one.size_bytes, one.power_w, one.temperature_c)
        for metric, value in zip(every, values, strict=True):
            if value is not None:
                metric.on(registry).labels(gpu=one.gpu, host=host).set(value)
