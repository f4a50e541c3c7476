"""The trainer's page for Prometheus, served by rank 0. Its metrics are declared in
millrace/telemetry/metrics/prometheus."""

import torch

from millrace.contracts.v1 import weights_pb2
from millrace.ids import MemberId
from millrace.telemetry.gpus import GpuReading
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import trainer as names
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.members import (
    MEMBER_TOKENS,
    SENDER_PHASES,
    describe_gpus,
    describe_member,
    record_publication,
)
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.service.servicer import TrainerService


class TrainerMetrics:
    """What Prometheus reads of the trainer: of rank 0's process, and of each rank what its last heartbeat told."""

    def __init__(self, member_id: MemberId, heartbeats: Heartbeats) -> None:
        self.registry = DeclaredRegistry(Owner.TRAINER)
        describe_process(self.registry, Owner.TRAINER)
        self._member_id = member_id
        self._heartbeats = heartbeats
        self._counted_tokens = 0
        self._cpu_s: dict[int, float] = {}
        """CPU time of each rank that is counted already."""

    def published(self, report: weights_pb2.MemberReport) -> None:
        """Records the trainer's part in a publication whose weights it has sent."""
        record_publication(self.registry, report, SENDER_PHASES)

    def refresh(self, trainer: TrainerService) -> None:
        """Sets every gauge to what the trainer is now. On the event loop of its service."""
        describe_member(
            self.registry,
            member=self._member_id,
            engine="torch",
            engine_release=torch.__version__,
            job_id=trainer.job_id,
            version=trainer.version,
        )
        MEMBER_TOKENS.on(self.registry).inc(trainer.trained_tokens - self._counted_tokens)
        self._counted_tokens = trainer.trained_tokens
        self._ranks()

    def _ranks(self) -> None:
        names.RANKS.on(self.registry).set(self._heartbeats.ranks)
        readings: list[tuple[str, GpuReading]] = []
        for rank, (silent_s, usage) in self._heartbeats.heard().items():
            host = self._heartbeats.host(rank).partition(" ")[0]
            labels = {"rank": str(rank), "host": host}
            readings += [(host, usage.gpu)] if usage.gpu is not None else []
            names.RANK_SILENT_S.on(self.registry).labels(**labels).set(silent_s)
            names.RANK_RESIDENT.on(self.registry).labels(**labels).set(usage.resident_bytes)
            cpu_s = names.RANK_CPU_S.on(self.registry).labels(**labels)
            cpu_s.inc(max(0.0, usage.cpu_s - self._cpu_s.get(rank, 0.0)))
            self._cpu_s[rank] = usage.cpu_s
            for kind, size in usage.gpu_bytes.items():
                names.RANK_GPU_MEMORY.on(self.registry).labels(**labels, kind=kind).set(size)
        describe_gpus(self.registry, readings)
