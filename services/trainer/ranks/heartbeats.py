"""Heartbeats of the ranks: each rank writes its own to the store of commands, from a separate thread."""

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import psutil
import structlog
import torch
from torch.distributed import DistError

from millrace.contracts.v1 import fleet_pb2
from millrace.telemetry.usage import GpuReading, Gpus, HostMemory, host_memory, usage_message
from millrace.wire.membership import heed_notice
from services.trainer.ranks.world import World


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


log = structlog.get_logger(__name__)

EVERY_S = 1.0
LEAVE_S = 5.0


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat of a rank."""

    number: int
    wants_drain: bool
    """Whether the rank asks that the trainer drains."""
    usage: Usage = Usage()
    """What the rank uses of its host and GPU."""

    def encode(self) -> bytes:
        return json.dumps([self.number, self.wants_drain, self.usage.to_json()]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Heartbeat":
        number, wants_drain, usage = json.loads(data)
        return cls(number, wants_drain, Usage.from_json(usage))


class Heartbeats:
    """Writes this rank's heartbeat; on rank 0 also reads the others'.

    A rank that cannot reach rank 0 ends its process at once: its main thread may be blocked in a collective for ever.
    """

    def __init__(self, world: World, silent_s: float) -> None:
        """A rank whose heartbeat has not changed for `silent_s` is dead or stopped."""
        self._world = world
        self.silent_s = silent_s
        self._store = world.connect(timeout_s=silent_s)
        self._store.set(f"host/{world.rank}", f"{world.host} (pid {os.getpid()})".encode())
        self._hosts: dict[int, str] = {}
        self._last: dict[int, tuple[Heartbeat | None, float]] = {}
        """The newest heartbeat of each rank, and time.monotonic() when it was first seen."""
        self._wants_drain = False
        self._drain_reported = False
        self._usage = Usage()
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self, on_drain: Callable[[], None]) -> None:
        """Starts the heartbeats. `on_drain` is called on rank 0, once, when another rank asks to drain."""
        self._on_drain = on_drain
        self._thread.start()
        threading.Thread(target=self._measure, name="usage", daemon=True).start()

    def drain(self) -> None:
        """Asks rank 0 to drain the trainer, with the next heartbeat. Safe in a signal handler."""
        self._wants_drain = True

    def silent(self) -> dict[int, float]:
        """The ranks that are dead or stopped, each with the seconds since its last heartbeat. For rank 0."""
        now = time.monotonic()
        ages = {rank: now - at for rank, (_, at) in self._last.items()}
        return {rank: seconds for rank, seconds in ages.items() if seconds > self.silent_s}

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._world.size

    def heard(self) -> dict[int, tuple[float, Usage]]:
        """For each rank that has sent a heartbeat the seconds since the last one, and the usage that it reported. For
        rank 0."""
        now, last = time.monotonic(), dict(self._last)
        return {rank: (now - at, beat.usage) for rank, (beat, at) in last.items() if beat is not None}

    def host(self, rank: int) -> str:
        """Host and process id of a rank, for messages to people."""
        return self._hosts.get(rank, "an unknown host")

    def usage(self) -> fleet_pb2.MemberUsage:
        """What the ranks use of their hosts and GPUs. For rank 0."""
        named = {rank: host.partition(" ")[0] for rank, host in self._hosts.items()}
        return usage_of_ranks([(named[rank], usage) for rank, (_, usage) in self.heard().items() if rank in named])

    def stop(self) -> None:
        """Ends the heartbeats. Rank 0, which serves the store, waits until the others have ended theirs."""
        self._stopped.set()
        self._thread.join()
        self._store.set(f"left/{self._world.rank}", b"")
        if self._world.rank == 0:
            with contextlib.suppress(DistError):
                self._store.wait([f"left/{rank}" for rank in range(self._world.size)], LEAVE_S)

    def _run(self) -> None:
        number = 0
        try:
            while not self._stopped.wait(EVERY_S):
                number += 1
                wants_drain = self._wants_drain or self._orphaned() or heed_notice()
                heartbeat = Heartbeat(number, wants_drain, self._usage)
                self._store.set(f"heartbeat/{self._world.rank}", heartbeat.encode())
                if self._world.rank == 0:
                    self._read_all()
        except DistError as error:
            log.error("rank 0 cannot be reached: this rank ends", rank=self._world.rank, error=str(error))
            os._exit(1)

    def _measure(self) -> None:
        """Keeps the rank's usage current. Not on the thread of the heartbeats: a GPU that does not answer would make
        the rank look dead."""
        meter = UsageMeter(self._world.device)
        while not self._stopped.wait(EVERY_S):
            self._usage = meter.measure()

    def _read_all(self) -> None:
        now = time.monotonic()
        for rank in range(self._world.size):
            if rank not in self._hosts and self._store.has(f"host/{rank}"):
                self._hosts[rank] = self._store.get(f"host/{rank}").decode()
            key = f"heartbeat/{rank}"
            heartbeat = Heartbeat.decode(self._store.get(key)) if self._store.has(key) else None
            if rank not in self._last or heartbeat != self._last[rank][0]:
                self._last[rank] = (heartbeat, now)
            if heartbeat is not None and heartbeat.wants_drain and not self._drain_reported:
                self._drain_reported = True
                self._on_drain()

    def _orphaned(self) -> bool:
        """Whether the launcher or torchrun was killed: then nobody ends the ranks."""
        if (launcher := multiprocessing.parent_process()) is not None and not launcher.is_alive():
            return True
        return "LOCAL_WORLD_SIZE" in os.environ and os.getppid() != self._parent
