"""Joining a communicator such that waiting for the other ranks can be interrupted."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.store import serve_store

__all__ = ["Rendezvous", "interruptible", "join", "nccl_id", "serve_store"]
Result = TypeVar("Result")
POLL_EVERY_S = 0.05


@dataclass(frozen=True)
class Rendezvous:
    """The address at which a rank joins a communicator, and its number there."""

    host: str
    port: int
    key: str
    """Name of the communicator."""
    rank: int
    world_size: int
    nccl_id: bytes
    """NCCL's unique id; empty for a communicator of Gloo."""
    device: torch.device
    """Device of this rank's weights."""
    timeout_s: float

    @classmethod
    def of_rank(cls, of_all: weights_pb2.Rendezvous, rank: int, device: torch.device, timeout_s: float) -> Self:
        """The rendezvous of all ranks, for rank `rank` with its weights on `device`."""
        where = (of_all.host, of_all.port, of_all.key)
        return cls(*where, rank, of_all.world_size, of_all.nccl_id, device, timeout_s)


def nccl_id(gpu: bool) -> bytes:
    """A new unique id of NCCL, which all ranks of a communicator need; empty if they use Gloo."""
    if not gpu:
        return b""
    from millrace.weights.transfer.channels.nccl import unique_id

    return unique_id()


def join(rendezvous: Rendezvous, failure: Callable[[], PublicationFailed | None]) -> Channel:
    """Blocks until all ranks have joined.

    Raises PublicationFailed if a rank does not come, or the error that `failure` returns as soon as it returns one;
    a channel that is ready only after that is closed.
    """
    return interruptible(f"communicator {rendezvous.key}", lambda: _channel(rendezvous), failure, _close_late)


def interruptible(
    what: str,
    work: Callable[[], Result],
    failure: Callable[[], PublicationFailed | None],
    discard: Callable[[Result], None] = lambda result: None,
) -> Result:
    """The result of `work`, which runs in a thread of its own, so that the caller is never blocked in it.

    Raises the error that `failure` returns as soon as it returns one; `discard` gets a result that comes after that.
    `what` names the result in the error that is raised if `work` fails.
    """
    task = _Task(what, work, discard)
    while not task.over.wait(POLL_EVERY_S):
        if (error := failure()) is not None:
            task.abandon()
            raise error
    return task.result()


class _Task(Generic[Result]):
    """Work in a thread that may be abandoned."""

    def __init__(self, what: str, work: Callable[[], Result], discard: Callable[[Result], None]) -> None:
        self._what, self._work, self._discard = what, work, discard
        self._lock = threading.Lock()
        self._abandoned = False
        self._results: list[Result] = []
        self._error: PublicationFailed | None = None
        self.over = threading.Event()
        threading.Thread(target=self._run, name=f"make {what}", daemon=True).start()

    def _run(self) -> None:
        try:
            result = self._work()
        except PublicationFailed as error:
            self._error = error
        except Exception as error:  # the outermost frame of a thread: the waiter for the result gets it
            self._error = PublicationFailed(f"{self._what} could not be made: {error!r}")
        else:
            with self._lock:
                self._results.append(result)
                if self._abandoned:
                    self._discard(result)
        self.over.set()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            for result in self._results:
                self._discard(result)

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]


def _close_late(channel: Channel) -> None:
    channel.abort("it came too late")
    channel.close()


def _channel(rendezvous: Rendezvous) -> Channel:
    if rendezvous.nccl_id:
        from millrace.weights.transfer.channels.nccl import NcclChannel

        return NcclChannel.join(
            rendezvous.nccl_id,
            key=rendezvous.key,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            device=rendezvous.device,
        )
    return GlooChannel.join(
        rendezvous.host,
        rendezvous.port,
        key=rendezvous.key,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout_s=rendezvous.timeout_s,
    )
