"""What a member uses of its host and GPUs, for its heartbeat: measured on threads that nothing waits for.

What the GPUs do is read from NVIDIA's management library (NVML), which starts no CUDA. Its Python package
`nvidia-ml-py` comes with the GPU builds of the engines; without it there are no readings of GPUs. A GPU that hangs may
block a call for ever.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import psutil
import structlog

from millrace.contracts.field_rules import MOST_GPUS, MOST_HOSTS
from millrace.contracts.v1 import fleet_pb2

Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)
GPUS_EVERY_S = 2.0
PACKAGE = "pynvml"
EVERY_S = 5.0
"""Seconds between two readings of memory. One looks through all processes of the host."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time. A figure that it does not report is None."""

    gpu: str
    """Number of the GPU on its host, as `nvidia-smi` counts."""
    used_bytes: int
    """Memory that all processes together use."""
    size_bytes: int
    busy: float | None = None
    """Part of the last moment (up to a second) in which it ran a kernel, 0 to 1."""
    power_w: float | None = None
    temperature_c: float | None = None


class Gpus:
    """The GPUs of this host that `wanted` names, opened once: numbers or UUIDs, or beginnings of UUIDs. None: all."""

    def __init__(self, wanted: Sequence[str] | None = None) -> None:
        self._nvml: Any = None  # Any: the library has no types
        self._handles: list[tuple[str, Any]] = []
        if importlib.util.find_spec(PACKAGE) is None:
            return
        nvml = importlib.import_module(PACKAGE)
        try:
            nvml.nvmlInit()
            handles = [(str(n), nvml.nvmlDeviceGetHandleByIndex(n)) for n in range(nvml.nvmlDeviceGetCount())]
            self._handles = [(n, handle) for n, handle in handles if wanted is None or _named(nvml, n, handle, wanted)]
        except nvml.NVMLError as error:
            log.info("GPUs are not measured", reason=str(error))
            return
        self._nvml = nvml

    def read(self) -> list[GpuReading]:
        """A reading of each; none if they cannot be read."""
        if self._nvml is None:
            return []
        with contextlib.suppress(self._nvml.NVMLError):
            return [self._reading(number, handle) for number, handle in self._handles]
        return []

    def _reading(self, number: str, handle: Any) -> GpuReading:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = self._ask_device(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power_mw = self._ask_device(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        temperature = self._ask_device(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuReading(
            gpu=number,
            used_bytes=int(memory.used),
            size_bytes=int(memory.total),
            busy=None if rates is None else rates.gpu / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=None if temperature is None else float(temperature),
        )

    def _ask_device(self, ask: Callable[[], Answer]) -> Answer | None:
        """The answer; None if this kind of GPU has none."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


class GpuMonitor:
    """Keeps readings current on a thread of its own."""

    def __init__(self, wanted: Sequence[str] | None = None, every_s: float = GPUS_EVERY_S) -> None:
        self.latest: list[GpuReading] = []
        """Empty until the first reading, and if there is nothing to read."""
        self._wanted, self._every_s = wanted, every_s
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins. If the library is not installed nothing is started."""
        if importlib.util.find_spec(PACKAGE) is not None:
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        gpus = Gpus(self._wanted)
        while True:
            self.latest = gpus.read()
            if self._stopped.wait(self._every_s):
                return


def visible() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None: all of the host."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [one.strip() for one in named.split(",") if one.strip()]


def _named(nvml: Any, number: str, handle: Any, wanted: Sequence[str]) -> bool:
    if number in wanted:
        return True
    uuid = nvml.nvmlDeviceGetUUID(handle)
    uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    named = [one.removeprefix("GPU-") for one in wanted if not one.isdecimal()]
    return any(one and uuid.removeprefix("GPU-").startswith(one) for one in named)


@dataclass(frozen=True)
class HostMemory:
    """Memory of one host, in bytes."""

    process_bytes: int
    """Resident memory of the member's processes. What several of them share counts once for each."""
    used_bytes: int
    """Used by all processes of the host, without its file cache."""
    size_bytes: int


def host_memory(process_bytes: int) -> HostMemory:
    """This host's memory, of which the caller's processes hold `process_bytes`."""
    host = psutil.virtual_memory()
    return HostMemory(process_bytes, host.total - host.available, host.total)


def process_tree_bytes() -> int:
    """Resident memory of this process and of all processes that it started, directly or not."""
    own = psutil.Process()
    total: int = own.memory_info().rss
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            total += child.memory_info().rss
    return total


class UsageMonitor:
    """Keeps the usage of a replica current: the memory of its processes on this host, and its GPUs."""

    def __init__(self, host: str, every_s: float = EVERY_S) -> None:
        self.host = host
        self.gpus = GpuMonitor(visible())
        self.measured = threading.Event()
        """Set after the first reading of memory."""
        self._memory: HostMemory | None = None
        self._every_s = every_s
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to measure, until the process ends or `stop` is called."""
        self.gpus.start()
        threading.Thread(target=self._run, name="memory", daemon=True).start()

    def stop(self) -> None:
        self.gpus.stop()
        self._stopped.set()

    def message(self, cache_used: float | None = None) -> fleet_pb2.MemberUsage:
        """The usage for a heartbeat. `cache_used`: part of the engine's cache in use, 0 to 1; None: not known."""
        memory = [(self.host, self._memory)] if self._memory is not None else []
        return usage_message(memory, [(self.host, one) for one in self.gpus.latest], cache_used)

    def _run(self) -> None:
        while True:
            self._memory = host_memory(process_tree_bytes())
            self.measured.set()
            if self._stopped.wait(self._every_s):
                return


def usage_message(
    memory: Iterable[tuple[str, HostMemory]],
    gpus: Iterable[tuple[str, GpuReading]],
    cache_used: float | None = None,
) -> fleet_pb2.MemberUsage:
    """The usage of a member from readings with the host of each. Memory of the same host and readings of the same GPU
    are put together."""
    hosts: dict[str, fleet_pb2.HostUsage] = {}
    for host, one in memory:
        total = hosts.setdefault(host, fleet_pb2.HostUsage(host=host))
        total.process_bytes += one.process_bytes
        total.used_bytes, total.size_bytes = one.used_bytes, one.size_bytes
    seen = {(host, one.gpu): fleet_pb2.GpuUsage(host=host, **asdict(one)) for host, one in gpus}
    usage = fleet_pb2.MemberUsage(hosts=[*hosts.values()][:MOST_HOSTS], gpus=[*seen.values()][:MOST_GPUS])
    if cache_used is not None and math.isfinite(cache_used):
        usage.cache_used = min(1.0, max(0.0, cache_used))
    return usage
