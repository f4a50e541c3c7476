"""NCCL through CuPy on CUDA tensors, in a communicator that is made from a unique id, without torch.distributed.

Pointers and streams are passed to NCCL; nothing is copied. Operations run on a separate stream of the channel, ordered
with the caller's stream by events. No call blocks on the GPU: waiting polls the clock and NCCL's asynchronous errors,
and past the deadline the communicator is aborted, which ends its kernels.

NCCL ends a communicator only together with the other processes of the host, and waits for one that hangs. So a separate
thread ends it, and is waited for only ENDS_S.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.channel import ChannelMessage, ChannelState

POLL_EVERY_S = 50e-6
ERRORS_EVERY_S = 0.01
ENDS_S = 0.5
"""Longest wait for the end of a communicator. Its kernels end in milliseconds."""


def unique_id() -> bytes:
    """A new unique id, which all ranks of a communicator need to join it."""
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())


class NcclChannel(ChannelState):
    """One rank's end of a communicator. Used by one thread at a time; `abort` comes from any."""

    def __init__(self, communicator: Any, key: str, rank: int, device: torch.device) -> None:
        super().__init__(key, rank)
        self._communicator = communicator
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self._errors_checked_at = 0.0

    @classmethod
    def join(cls, identity: bytes, *, key: str, rank: int, world_size: int, device: torch.device) -> "NcclChannel":
        """Returns when all ranks have joined, which NCCL does not limit in time: call it where waiting can be
        interrupted. Raises PublicationFailed if NCCL cannot connect."""
        from cupy.cuda import nccl

        torch.cuda.set_device(device)
        try:
            communicator = nccl.NcclCommunicator(world_size, identity, rank)
        except (RuntimeError, AssertionError) as error:
            what = f"rank {rank} of {world_size} could not join communicator {key}: {error}"
            raise PublicationFailed(what, "see whether every member is alive; NCCL_DEBUG=INFO says more.") from error
        return cls(communicator, key, rank, device)

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> "NcclExchange":
        """See `Channel`. Messages between two ranks in one round match in the order in which they are given."""
        from cupy.cuda import nccl

        self.check()
        if stream is not None:
            self._stream.wait_stream(stream)
        handle = self._stream.cuda_stream
        with torch.cuda.device(self._device):
            try:
                nccl.groupStart()
                try:
                    for p in receives:
                        pointer, size = p.data.data_ptr(), p.data.numel()
                        self._communicator.recv(pointer, size, nccl.NCCL_UINT8, p.peer, handle)
                    for p in sends:
                        pointer, size = p.data.data_ptr(), p.data.numel()
                        self._communicator.send(pointer, size, nccl.NCCL_UINT8, p.peer, handle)
                finally:
                    nccl.groupEnd()
            except RuntimeError as error:
                raise self.fail(f"a round could not begin: {error}") from error
            event = torch.cuda.Event()
            event.record(self._stream)
        return NcclExchange(self, event, [*sends, *receives])

    def check(self) -> None:
        """Raises PublicationFailed if the channel has failed, a peer is gone, or the deadline has passed."""
        super().check()
        now = time.monotonic()
        if now > self.deadline:
            self.abort("its deadline has passed")
            raise self.fail("its deadline has passed")
        if now - self._errors_checked_at > ERRORS_EVERY_S:
            self._errors_checked_at = now
            try:
                with self._lock:
                    self._communicator.check_async_error()
            except RuntimeError as error:
                raise self.fail(f"a peer is gone, or the link: {error}") from error

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Channel`. NCCL's kernels end at once."""
        self.fail(reason)
        self._end(aborts=True)

    def close(self) -> None:
        """Frees the communicator; one that failed is aborted, since destroying it would wait for its operations."""
        self._end(aborts=self._failure is not None)

    def _end(self, *, aborts: bool) -> None:
        """Ends the communicator once; a second call waits for the same end."""
        with self._lock:
            if self._ending is None:
                communicator, self._communicator = self._communicator, _EndedCommunicator()
                self._ending = threading.Thread(
                    target=communicator.abort if aborts else self._destroy,
                    args=() if aborts else (communicator,),
                    name=f"end of {self.key}",
                    daemon=True,
                )
                self._ending.start()
        self._ending.join(ENDS_S)

    def _destroy(self, communicator: Any) -> None:
        self._stream.synchronize()
        communicator.destroy()


class _EndedCommunicator:
    """Replaces a communicator that was aborted or destroyed."""

    def send(self, *unused: Any) -> None:
        raise RuntimeError("the communicator was ended")

    recv = send

    def check_async_error(self) -> None:
        raise RuntimeError("the communicator was ended")


class NcclExchange:
    """A `PendingExchange` of NCCL; keeps the memory that NCCL reads and writes."""

    def __init__(self, channel: NcclChannel, event: Any, messages: Sequence[ChannelMessage]) -> None:
        self._channel = channel
        self._event = event
        self._messages = messages

    def wait_received(self, stream: Any = None) -> None:
        if stream is not None:
            self._channel.check()
            stream.wait_event(self._event)
        else:
            self.wait()

    def wait(self) -> None:
        while not self._event.query():
            self._channel.check()
            time.sleep(POLL_EVERY_S)
        if (failure := self._channel.failure) is not None:
            raise failure
