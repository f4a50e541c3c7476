"""Gloo on CPU tensors, in a communicator that is independent of torch.distributed's default group.

Every call may block: make it from a worker thread, never from one that serves requests.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.channel import ChannelMessage, ChannelState
from millrace.weights.transfer.store import connect_store

POLL_EVERY_S = 0.05
"""How soon an abort ends waiting for a round."""
LONGEST_S = 24 * 3600.0
"""Gloo's timeout if the channel has no deadline."""
DISCONNECT_AFTER_S = 0.3
"""Delay between an abort and closing the connections: the others get the failure signal before they see that."""
NO_WAIT = timedelta(milliseconds=1)
AT_EXIT_S = 2.0
"""How long the end of the process waits for connections that are being closed."""

_disconnects: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _finish_disconnects() -> None:
    """Joins the threads that close connections: one that frees a group while the interpreter ends aborts the process,
    because Python ends a daemon thread inside the group's destructor."""
    until = time.monotonic() + AT_EXIT_S
    for thread in list(_disconnects):
        thread.join(max(0.0, until - time.monotonic()))


class GlooChannel(ChannelState):
    """One rank's end of a communicator. Rank 0 is the sender."""

    def __init__(self, group: ProcessGroupGloo, store: TCPStore, key: str, rank: int) -> None:
        super().__init__(key, rank)
        self._group: Any = group  # torch's stubs lack its collectives
        self._store = store  # the group uses it as long as it exists
        self._exchanges: queue.SimpleQueue[GlooExchange | None] = queue.SimpleQueue()
        self._in_progress: set[GlooExchange] = set()
        self._aborted = threading.Lock()
        self._waiter: threading.Thread | None = None

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
        """Joins communicator `key` at the store; returns when all ranks have joined.

        `timeout_s` bounds the rendezvous and each later operation. Rank 0 passes the `store` it serves. Raises
        PublicationFailed if a rank does not come.
        """
        limit = timedelta(seconds=timeout_s)
        try:
            if store is None:
                store = connect_store(host, port, timeout_s, world_size)
            group = ProcessGroupGloo(PrefixStore(key, store), rank, world_size, limit)
        except (RuntimeError, ValueError) as error:
            what = f"rank {rank} of {world_size} could not join communicator {key} at {host}:{port}: {error}"
            raise PublicationFailed(what, "see whether every member of the publication is alive.") from error
        return cls(group, store, key, rank)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Sends `tensor` (contiguous, on CPU) from `root` to every rank, or receives into it."""
        options = BroadcastOptions()
        options.rootRank = root
        # Gloo does not support 16-bit floats in every operation, but bytes.
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        try:
            self._group.broadcast([flat], options).wait()
        except RuntimeError as error:
            what = f"a broadcast on communicator {self.key} failed at rank {self.rank}: {error}"
            raise PublicationFailed(
                what, "the members that died are cut out and the publication is repeated."
            ) from error

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> "GlooExchange":
        """See `Channel`. Tensors are on the CPU."""
        self.check()
        exchange = GlooExchange(self, [*receives, *sends])
        try:
            exchange.works = [self._group.recv([p.data], p.peer, p.number) for p in receives if p.data.numel()]
            exchange.works += [self._group.send([p.data], p.peer, p.number) for p in sends if p.data.numel()]
        except RuntimeError as error:
            raise self.fail(f"a round could not begin: {error}") from error
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name=f"gloo {self.key}", daemon=True)
            self._waiter.start()
        self._in_progress.add(exchange)
        self._exchanges.put(exchange)
        return exchange

    def _wait(self) -> None:
        """Waits for Gloo in a thread of its own: Gloo cannot be interrupted, and an abort must end every other wait."""
        while (exchange := self._exchanges.get()) is not None:
            try:
                for work in exchange.works:
                    left = max(0.001, min(self.deadline - time.monotonic(), LONGEST_S))
                    work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                late = time.monotonic() >= self.deadline
                self.fail("its deadline has passed" if late else str(error).splitlines()[0])
            self._in_progress.discard(exchange)
            exchange.release()
            exchange.done.set()

    def abort(self, reason: str = "it was aborted") -> None:
        """Ends operations in progress, which then raise in their threads: rounds at once, a broadcast when its timeout
        is over."""
        self.fail(reason)
        self._group.abort()
        if self._aborted.acquire(blocking=False):
            thread = threading.Thread(target=self._disconnect, name=f"end of {self.key}", daemon=True)
            _disconnects.add(thread)
            thread.start()

    def _disconnect(self) -> None:
        """Ends the messages that Gloo was asked for. An abort does not: one that came later would still be written. A
        wait that times out closes every connection of the group."""
        time.sleep(DISCONNECT_AFTER_S)
        for exchange in list(self._in_progress):
            for work in list(exchange.works):
                try:
                    work.wait(NO_WAIT)
                except RuntimeError:
                    return

    def close(self) -> None:
        """Frees sockets and threads."""
        self._exchanges.put(None)
        if self._failure is None and self._waiter is not None:
            self._waiter.join()
        if self._failure is None or self._waiter is None:
            self._group.shutdown()


class GlooExchange:
    """A `PendingExchange` of Gloo."""

    def __init__(self, channel: GlooChannel, messages: Sequence[ChannelMessage]) -> None:
        self._channel = channel
        self._messages = list(messages)  # keeps the memory that Gloo reads and writes
        self.works: list[Any] = []
        self.done = threading.Event()

    def release(self) -> None:
        """Frees the messages' memory."""
        self.works, self._messages = [], []

    def wait_received(self, stream: Any = None) -> None:
        self.wait()

    def wait(self) -> None:
        while not self.done.wait(POLL_EVERY_S):
            self._channel.check()
            if time.monotonic() > self._channel.deadline:
                raise self._channel.fail("its deadline has passed")
        self._channel.check()
