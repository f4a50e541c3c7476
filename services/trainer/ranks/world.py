"""The rank of this process among the trainer's ranks, and how the ranks connect to each other and to the store of
commands.

torchrun starts ranks again at a store that still holds what the ranks before them wrote, on each host at its own time.
Rank 0 opens a new life whenever it is started. A life has each rank once: a rank that finds its place taken, by the
process that it replaces, waits for the next life.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.distributed import Store as TorchStore
from torch.distributed.rendezvous import rendezvous

from millrace.descriptors import Hosts
from millrace.errors import Unavailable
from millrace.local.ports import free_port
from millrace.weights.transfer.store import connect_store, serve_store

POLL_S = 0.1
_LIVES = "millrace/lives"
_COMPLETE = "complete"


def agree(store: TorchStore, rank: int, size: int, timeout_s: float) -> TorchStore:
    """The part of `store` that belongs to this life alone; returns when all of its ranks are there. Raises Unavailable
    if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return _open(store, size, timeout_s) if rank == 0 else _enter(store, rank, deadline)


def _open(store: TorchStore, size: int, timeout_s: float) -> TorchStore:
    current = _life(store, store.add(_LIVES, 1))
    try:
        current.wait([_place(rank) for rank in range(1, size)], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        absent = [rank for rank in range(1, size) if not current.check([_place(rank)])]
        raise Unavailable(f"ranks {absent} of the trainer did not come within {timeout_s:g} s.", _FIX) from error
    current.set(_COMPLETE, "yes")
    return current


def _enter(store: TorchStore, rank: int, deadline: float) -> TorchStore:
    newest, entered = 0, False
    while True:
        if (number := store.add(_LIVES, 0)) > newest:
            newest = number
            entered = _life(store, newest).add(_place(rank), 1) == 1
        if entered and (current := _life(store, newest)).check([_COMPLETE]):
            return current
        if time.monotonic() > deadline:
            raise Unavailable(f"rank {rank} of the trainer found no rank 0, or not all of the others.", _FIX)
        time.sleep(POLL_S)


def _life(store: TorchStore, number: int) -> TorchStore:
    return PrefixStore(f"millrace/life/{number}", store)


def _place(rank: int) -> str:
    return f"rank/{rank}"


_FIX = "see the logs of torchrun on every host, and whether --master-addr is reached from all of them."


class Store:
    """A connection for one thread: a client that waits blocks every other thread that uses it.

    Every method raises DistError if rank 0 cannot be reached.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        client: Any = connect_store(host, port, timeout_s)
        self._client = client  # Any: torch's stubs do not know that values may be bytes

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        value: bytes = self._client.get(key)
        return value

    def has(self, key: str) -> bool:
        return bool(self._client.check([key]))

    def delete(self, key: str) -> None:
        self._client.delete_key(key)

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until all keys exist. Returns False if one still does not after `timeout_s` seconds."""
        try:
            self._client.wait(list(keys), timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True

    def take(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Removes those of the keys that exist and returns their values."""
        values = {key: self.get(key) for key in keys if self.has(key)}
        for key in values:
            self.delete(key)
        return values


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
            os.environ.setdefault("MASTER_PORT", str(free_port()))
        shared, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        store = agree(shared, rank, size, JOIN_S)
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
            served, port = serve_store(host, None, JOIN_S)
            store.set(_ADDRESS, str(port))
        port = int(store.get(_ADDRESS).decode())
        return cls(rank, size, socket.gethostname(), device, (host, port), served)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host, which torchrun says; all ranks if nothing does."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def connect(self, timeout_s: float) -> Store:
        """A new client of the store of commands, for one thread."""
        return Store(*self.commands, timeout_s)


def hosts_of_ranks() -> Hosts:
    """The hosts on which the ranks lie, as torchrun says; one if nothing does."""
    size = dist.get_world_size()
    return Hosts(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


@contextmanager
def _ends_after(limit_s: float) -> Iterator[None]:
    """Ends this process if the code inside takes longer: it may be blocked in a library for ever."""

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
