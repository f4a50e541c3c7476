"""What publications need of a channel: messages between the ranks of one communicator, several at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from millrace.errors import PublicationFailed


@dataclass(frozen=True)
class ChannelMessage:
    """`data` ([bytes] uint8, contiguous), which goes to or comes from rank `peer`. `number` identifies the message to
    both ends."""

    number: int
    peer: int
    data: torch.Tensor


class PendingExchange(Protocol):
    """The messages of one round, on their way."""

    def wait_received(self, stream: Any = None) -> None:
        """Returns when the received data may be read. On a CPU that is when it has arrived. On a GPU with a CUDA
        `stream` it is at once: work that is put on that stream after this call waits for the data. Raises
        PublicationFailed if a message does not arrive."""

    def wait(self) -> None:
        """Returns when everything was sent and received, on a GPU too, and its memory may be reused. Raises
        PublicationFailed if that fails."""


class MessageExchange(Protocol):
    """The part of a channel that a pipeline uses."""

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        """Starts a round and returns. The data is kept until the exchange is over. On a GPU, the messages to send were
        written by work put on `stream` before. All ranks call this for their rounds in the same order."""
        ...

    def check(self) -> None:
        """Raises PublicationFailed if the channel has failed: for a caller that waits for something else
        meanwhile."""


class Channel(MessageExchange, Protocol):
    """One rank's end of a communicator."""

    key: str
    """Name of the communicator."""
    rank: int
    deadline: float
    """time.monotonic() after which no message is waited for."""

    @property
    def failure(self) -> PublicationFailed | None:
        """Why the channel cannot be used any more; None while it can."""

    def abort(self, reason: str) -> None:
        """Ends operations in progress, which then raise in their threads, and all later ones. From any thread."""

    def close(self) -> None:
        """Frees the channel's sockets, threads and kernels."""


class ChannelState:
    """The part that all channels share: key, rank, deadline, and the failure that ends them."""

    def __init__(self, key: str, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.deadline = float("inf")
        self._failure: PublicationFailed | None = None

    @property
    def failure(self) -> PublicationFailed | None:
        """See `Channel`. A new error each time, since a raised one keeps the frames that it passed alive."""
        return self._failure.again() if self._failure is not None else None

    def check(self) -> None:
        """See `Channel`."""
        if (failure := self.failure) is not None:
            raise failure

    def fail(self, why: str) -> PublicationFailed:
        """Marks the channel as failed, unless it is; returns the first failure, to be raised."""
        if self._failure is None:
            what = f"communicator {self.key} failed at rank {self.rank}: {why}."
            self._failure = PublicationFailed(
                what, "the members that died are cut out and the publication is repeated."
            )
        return self._failure.again()
