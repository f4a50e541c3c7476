"""What a member uses of its host and GPUs, for its heartbeat: measured on threads that nothing waits for."""

import contextlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from millrace.contracts.field_rules import MOST_GPUS, MOST_HOSTS
from millrace.contracts.v1 import fleet_pb2
from millrace.telemetry.gpus import GpuMonitor, GpuReading, visible

EVERY_S = 5.0
"""Seconds between two readings of memory. One looks through all processes of the host."""


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
    seen = {(host, one.gpu): _gpu_message(host, one) for host, one in gpus}
    usage = fleet_pb2.MemberUsage(hosts=[*hosts.values()][:MOST_HOSTS], gpus=[*seen.values()][:MOST_GPUS])
    if cache_used is not None and math.isfinite(cache_used):
        usage.cache_used = min(1.0, max(0.0, cache_used))
    return usage


def _gpu_message(host: str, one: GpuReading) -> fleet_pb2.GpuUsage:
    return fleet_pb2.GpuUsage(
        host=host,
        gpu=one.gpu,
        used_bytes=one.used_bytes,
        size_bytes=one.size_bytes,
        busy=one.busy,
        power_w=one.power_w,
        temperature_c=one.temperature_c,
    )
