"""Joining a communicator without being stuck in it: whoever waits for the others can be called off."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.gloo import GlooChannel, serve_store

__all__ = ["Rendezvous", "apart", "join", "nccl_id", "serve_store"]
Made = TypeVar("Made")
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Rendezvous:
    """Where and as what a rank joins."""

    host: str
    port: int
    key: str
    rank: int
    world_size: int
    nccl_id: bytes
    """Empty: Gloo."""
    device: torch.device
    """Where this rank's memory is."""
    timeout_s: float


def nccl_id(gpu: bool) -> bytes:
    """Of a communicator to be, for all of its ranks; empty where they are to meet over Gloo."""
    if not gpu:
        return b""
    from millrace.weights.transfer.channels.nccl import unique_id

    return unique_id()


def join(rendezvous: Rendezvous, failure: Callable[[], PublicationFailed | None]) -> Channel:
    """Blocks until all have come. Raises PublicationFailed where somebody does not, or what `failure` says as soon as
    it says something; a channel that comes after that is closed."""
    return apart(f"communicator {rendezvous.key}", lambda: _channel(rendezvous), failure, _throw_away)


def apart(
    what: str,
    make: Callable[[], Made],
    failure: Callable[[], PublicationFailed | None],
    late: Callable[[Made], None] = lambda made: None,
) -> Made:
    """What `make` gives, in a thread of its own that nobody is stuck with: raises what `failure` says as soon as it
    says something, and `late` gets what is made after that. `what` it is, for the error where it cannot be made."""
    making = _Making(what, make, late)
    while not making.over.wait(LOOK_EVERY_S):
        if (error := failure()) is not None:
            making.forget()
            raise error
    return making.result()


class _Making(Generic[Made]):
    def __init__(self, what: str, make: Callable[[], Made], late: Callable[[Made], None]) -> None:
        self._what, self._make, self._late = what, make, late
        self._lock = threading.Lock()
        self._forgotten = False
        self._made: list[Made] = []
        self._error: PublicationFailed | None = None
        self.over = threading.Event()
        threading.Thread(target=self._run, name=f"make {what}", daemon=True).start()

    def _run(self) -> None:
        try:
            made = self._make()
        except PublicationFailed as error:
            self._error = error
        except Exception as error:  # nobody else would hear of it: whoever waits for this thread is told
            self._error = PublicationFailed(f"{self._what} could not be made: {error!r}")
        else:
            with self._lock:
                self._made.append(made)
                if self._forgotten:
                    self._late(made)
        self.over.set()

    def forget(self) -> None:
        with self._lock:
            self._forgotten = True
            for made in self._made:
                self._late(made)

    def result(self) -> Made:
        if self._error is not None:
            raise self._error
        return self._made[0]


def _throw_away(channel: Channel) -> None:
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
