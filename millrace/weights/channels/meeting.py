"""Joining a communicator without being stuck in it: whoever waits for the others can be called off."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from millrace.errors import PublicationFailed
from millrace.weights.channels.channel import Channel
from millrace.weights.channels.gloo import GlooChannel, serve_store

__all__ = ["Meeting", "join", "nccl_id", "serve_store"]
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Meeting:
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
    from millrace.weights.channels.nccl import unique_id

    return unique_id()


def join(meeting: Meeting, failure: Callable[[], PublicationFailed | None]) -> Channel:
    """Blocks until all have come. Raises PublicationFailed where somebody does not, or what `failure` says as soon as
    it says something; a channel that comes after that is closed."""
    joining = _Joining(meeting)
    while not joining.over.wait(LOOK_EVERY_S):
        if (error := failure()) is not None:
            joining.forget()
            raise error
    if joining.error is not None:
        raise joining.error
    assert joining.channel is not None
    return joining.channel


class _Joining:
    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._lock = threading.Lock()
        self._forgotten = False
        self.channel: Channel | None = None
        self.error: PublicationFailed | None = None
        self.over = threading.Event()
        threading.Thread(target=self._join, name=f"join {meeting.key}", daemon=True).start()

    def _join(self) -> None:
        try:
            channel = _channel(self._meeting)
        except PublicationFailed as error:
            self.error = error
        except Exception as error:  # nobody else would hear of it: whoever waits for this thread is told
            self.error = PublicationFailed(f"communicator {self._meeting.key} could not be made: {error!r}")
        else:
            with self._lock:
                self.channel = channel
                if self._forgotten:
                    channel.abort("it came too late")
                    channel.close()
        self.over.set()

    def forget(self) -> None:
        with self._lock:
            self._forgotten = True
            if self.channel is not None:
                self.channel.close()


def _channel(meeting: Meeting) -> Channel:
    if meeting.nccl_id:
        from millrace.weights.channels.nccl import NcclChannel

        return NcclChannel.join(
            meeting.nccl_id,
            key=meeting.key,
            rank=meeting.rank,
            world_size=meeting.world_size,
            device=meeting.device,
        )
    return GlooChannel.join(
        meeting.host,
        meeting.port,
        key=meeting.key,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout_s=meeting.timeout_s,
    )
