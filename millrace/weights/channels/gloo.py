"""Gloo on CPU tensors, outside any torch.distributed world: a communicator with a store of its own.

Every call blocks: make it from a worker thread, never from one that serves requests.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions

from millrace.errors import PublicationFailed


def serve_store(host: str, world_size: int, timeout_s: float) -> tuple[TCPStore, int]:
    """Serves the store where a communicator meets, on a free port of this host; returns it and the port. The store
    lives as long as the returned object; `host` is the address that the others are told."""
    store = TCPStore(host, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return store, store.port


class GlooChannel:
    """One rank's end of a communicator. Rank 0 is the sender."""

    def __init__(self, group: ProcessGroupGloo, store: TCPStore, key: str, rank: int) -> None:
        self._group: Any = group  # the stubs of torch leave out its collectives
        self._store = store  # the group reads it while it lives
        self.key = key
        self.rank = rank

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        key: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        store: TCPStore | None = None,
    ) -> "GlooChannel":
        """Meets the other ranks of communicator `key` at the store; returns once all have come.

        `timeout_s` bounds the meeting and each later operation. Rank 0 passes the `store` it serves. Raises
        PublicationFailed where somebody does not come.
        """
        limit = timedelta(seconds=timeout_s)
        try:
            if store is None:
                store = TCPStore(host, port, world_size, is_master=False, timeout=limit, wait_for_workers=False)
            group = ProcessGroupGloo(PrefixStore(key, store), rank, world_size, limit)
        except (RuntimeError, ValueError) as error:
            what = f"rank {rank} of {world_size} could not join communicator {key} at {host}:{port}: {error}"
            raise PublicationFailed(what, "see whether every member of the publication lives.") from error
        return cls(group, store, key, rank)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Sends `tensor` (contiguous, on CPU) from `root` to every rank, or receives into it."""
        options = BroadcastOptions()
        options.rootRank = root
        # Gloo knows no 16-bit floats in every operation; bytes are bytes.
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        try:
            self._group.broadcast([flat], options).wait()
        except RuntimeError as error:
            what = f"a broadcast on communicator {self.key} failed at rank {self.rank}: {error}"
            raise PublicationFailed(
                what, "the members that died are cut out and the publication is repeated."
            ) from error

    def abort(self) -> None:
        """Ends operations in progress, which then raise in their threads."""
        self._group.abort()

    def close(self) -> None:
        """Frees sockets and threads."""
        self._group.shutdown()
