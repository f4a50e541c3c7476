"""What a rank's process uses of its host and of its GPU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import psutil
import torch

from millrace.telemetry.gpus import GpuReading, Gpus


@dataclass(frozen=True)
class Usage:
    """What one rank uses."""

    cpu_s: float = 0.0
    """CPU time since its process started."""
    resident_bytes: int = 0
    """Memory of the host."""
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of the rank's GPU: `allocated` for tensors, `reserved` by torch, `free` for anybody, `total`. Empty on a
    CPU, and until the rank has used its GPU."""
    gpu: GpuReading | None = None
    """What its GPU does, the work of other processes included. None as above."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        gpu = tree["gpu"]
        return cls(**{**tree, "gpu": None if gpu is None else GpuReading(**gpu)})


class UsageMeter:
    """Measures the usage of this process, whose rank computes on `device`. Does not start CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpus: Gpus | None = None
        """Opened once the rank has used its GPU."""

    def measure(self) -> Usage:
        """The usage now. A GPU that hangs may block it."""
        process = psutil.Process()
        times = process.cpu_times()
        cpu_s, resident = times.user + times.system, process.memory_info().rss
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return Usage(cpu_s, resident)
        if self._gpus is None:
            self._gpus = Gpus([str(torch.cuda.get_device_properties(self._device).uuid)])
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        sizes = {"allocated": allocated, "reserved": reserved, "free": free, "total": total}
        without_nvml = GpuReading(str(self._device.index), total - free, total)
        return Usage(cpu_s, resident, sizes, next(iter(self._gpus.read()), without_nvml))
