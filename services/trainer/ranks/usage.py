"""What a rank's process uses of its host and of its GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import psutil
import torch

from millrace.contracts.v1 import fleet_pb2
from millrace.telemetry.gpus import GpuReading, Gpus
from millrace.telemetry.usage import HostMemory, host_memory, usage_message


@dataclass(frozen=True)
class Usage:
    """What one rank uses."""

    cpu_s: float = 0.0
    """CPU time since its process started."""
    resident_bytes: int = 0
    """Memory of the host that the process holds."""
    host_used_bytes: int = 0
    """Memory of the host that all processes use, without its file cache."""
    host_size_bytes: int = 0
    """Memory that the host has; 0 until it is measured."""
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
        cpu_s, memory = times.user + times.system, host_memory(process.memory_info().rss)
        host = (memory.process_bytes, memory.used_bytes, memory.size_bytes)
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return Usage(cpu_s, *host)
        if self._gpus is None:
            self._gpus = Gpus([str(torch.cuda.get_device_properties(self._device).uuid)])
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        sizes = {"allocated": allocated, "reserved": reserved, "free": free, "total": total}
        without_nvml = GpuReading(str(self._device.index), total - free, total)
        return Usage(cpu_s, *host, sizes, next(iter(self._gpus.read()), without_nvml))


def usage_of_ranks(ranks: Iterable[tuple[str, Usage]]) -> fleet_pb2.MemberUsage:
    """The trainer's usage, from the usage of its ranks with the host of each."""
    measured = [(host, one) for host, one in ranks if one.host_size_bytes]
    memory = [
        (host, HostMemory(one.resident_bytes, one.host_used_bytes, one.host_size_bytes)) for host, one in measured
    ]
    return usage_message(memory, [(host, one.gpu) for host, one in measured if one.gpu is not None])
