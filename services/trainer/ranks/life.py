"""Which processes are the ranks of one life of the trainer.

torchrun starts ranks again at a store that still holds what the ranks before them wrote, on each host at its own time.
Rank 0 opens a new life whenever it is started. A life has each rank once: a rank that finds its place taken, by the
process that it replaces, waits for the next life.
"""

import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from millrace.errors import Unavailable

POLL_S = 0.1
_LIVES = "millrace/lives"
_COMPLETE = "complete"


def agree(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """The part of `store` that belongs to this life alone; returns when all of its ranks are there. Raises Unavailable
    where that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return _open(store, size, timeout_s) if rank == 0 else _enter(store, rank, deadline)


def _open(store: Store, size: int, timeout_s: float) -> Store:
    life = _life(store, store.add(_LIVES, 1))
    try:
        life.wait([_place(rank) for rank in range(1, size)], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        absent = [rank for rank in range(1, size) if not life.check([_place(rank)])]
        raise Unavailable(f"ranks {absent} of the trainer did not come within {timeout_s:g} s.", _FIX) from error
    life.set(_COMPLETE, "yes")
    return life


def _enter(store: Store, rank: int, deadline: float) -> Store:
    newest, entered = 0, False
    while True:
        if (number := store.add(_LIVES, 0)) > newest:
            newest = number
            entered = _life(store, newest).add(_place(rank), 1) == 1
        if entered and (life := _life(store, newest)).check([_COMPLETE]):
            return life
        if time.monotonic() > deadline:
            raise Unavailable(f"rank {rank} of the trainer found no rank 0, or not all of the others.", _FIX)
        time.sleep(POLL_S)


def _life(store: Store, number: int) -> Store:
    return PrefixStore(f"millrace/life/{number}", store)


def _place(rank: int) -> str:
    return f"rank/{rank}"


_FIX = "see the logs of torchrun on every host, and whether --master-addr is reached from all of them."
