"""The rank of this process among the trainer's ranks, and how the ranks connect to each other."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from millrace.descriptors import Hosts
from services.trainer.ranks import life
from services.trainer.ranks.store import Store

log = structlog.get_logger(__name__)

JOIN_S = 600.0
CONNECT_S = 120.0
"""Longest time in which the ranks connect to each other, once all are there. One that died meanwhile never does."""
COLLECTIVE_S = 24 * 3600.0
"""Limit of a collective, as a last resort only: rank 0's control thread watches the deadline of each command."""
_ADDRESS = "millrace/commands"


@dataclass(frozen=True)
class World:
    """What a rank knows of itself and of the others."""

    rank: int
    size: int
    host: str
    device: torch.device
    commands: tuple[str, int]
    """Host and port of the store of commands, which rank 0 serves."""
    served: TCPStore | None
    """The store that rank 0 serves, which lives as long as this object; None on other ranks."""

    @classmethod
    def join(cls) -> "World":
        """Connects to the other ranks as torchrun's environment says. Without that environment this process is the
        only rank."""
        if "RANK" not in os.environ:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ.setdefault("MASTER_PORT", str(_free_port()))
        shared, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        store = life.agree(shared, rank, size, JOIN_S)
        device = _device()
        with _ends_after(CONNECT_S):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
                store=PrefixStore("millrace/world", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_S),
                device_id=device if device.type == "cuda" else None,
            )
        host, served = os.environ["MASTER_ADDR"], None
        if rank == 0:
            served = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            store.set(_ADDRESS, str(served.port))
        port = int(store.get(_ADDRESS).decode())
        return cls(rank, size, socket.gethostname(), device, (host, port), served)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host, which torchrun says; all ranks where nothing does."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def connect(self, timeout_s: float) -> Store:
        """A new client of the store of commands, for one thread."""
        return Store(*self.commands, timeout_s)


def hosts_of_ranks() -> Hosts:
    """The hosts on which the ranks lie, as torchrun says; one where nothing does."""
    size = dist.get_world_size()
    return Hosts(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


@contextmanager
def _ends_after(limit_s: float) -> Iterator[None]:
    """Ends this process where the code inside takes longer: it may be blocked in a library for ever."""

    def end() -> None:
        log.error("the ranks of the trainer could not connect to each other: this rank ends", limit_s=limit_s)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
