"""Prometheus metrics of the trainer: rank 0 serves those of all ranks, with the label `rank`."""

from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import counter, gauge

RANKS = gauge("millrace_trainer_ranks", Unit.COUNT, "Ranks of the trainer.")
RANK_SILENT_S = gauge(
    "millrace_rank_silent_seconds",
    Unit.SECONDS,
    "Time since the rank's last heartbeat; one a second is expected.",
    "rank",
    "host",
)
RANK_CPU_S = counter("millrace_rank_cpu_seconds_total", Unit.SECONDS, "CPU time of the rank's process.", "rank", "host")
RANK_RESIDENT = gauge(
    "millrace_rank_resident_memory_bytes",
    Unit.BYTES,
    "Memory of the host that the rank's process occupies.",
    "rank",
    "host",
)
RANK_GPU_MEMORY = gauge(
    "millrace_rank_gpu_memory_bytes",
    Unit.BYTES,
    "Memory of the rank's GPU: allocated for tensors, reserved by torch, free for anybody, and total. Not on CPUs.",
    "rank",
    "host",
    "kind",
)
