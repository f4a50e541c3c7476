"""What a rank's process uses of its host and of its GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import torch


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

    @classmethod
    def of(cls, device: torch.device) -> "Usage":
        """Usage of this process, now. Does not start CUDA."""
        process = psutil.Process()
        times = process.cpu_times()
        return cls(times.user + times.system, process.memory_info().rss, _gpu_bytes(device))


def _gpu_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"allocated": allocated, "reserved": reserved, "free": free, "total": total}
