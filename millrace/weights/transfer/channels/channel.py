"""What a channel is to a publication: messages between ranks of one communicator, several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from millrace.errors import PublicationFailed


@dataclass(frozen=True)
class ChannelMessage:
    """A message: `data` (uint8, contiguous) goes to or comes from `peer`. `number` tells messages apart; both ends
    give it."""

    number: int
    peer: int
    data: torch.Tensor


class PendingExchange(Protocol):
    """Messages on their way."""

    def wait_received(self, stream: Any = None) -> None:
        """Returns once what was received may be read: on a CPU when it is there; on a GPU at once, and work that is
        put on `stream` after this comes after it. Raises PublicationFailed where a message does not come."""

    def wait(self) -> None:
        """Returns once everything was sent and received, on a GPU too: its memory may be used for something else."""


class Channel(Protocol):
    key: str
    rank: int
    deadline: float
    """time.monotonic() after which no message is waited for."""

    @property
    def failure(self) -> PublicationFailed | None:
        """Why it is of no use any more."""

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        """Starts a round and returns. The data is kept until the exchange is over. On a GPU, the messages to send were
        written by work put on `stream` before. All ranks call this for their rounds in the same order."""

    def check(self) -> None:
        """Raises PublicationFailed where the channel has failed: for whoever waits for something else meanwhile."""

    def abort(self, reason: str) -> None:
        """Ends operations in progress, which then raise in their threads, and all later ones. From any thread."""

    def close(self) -> None: ...


class Breakable:
    """What channels share: whose they are, and the failure that ends them."""

    def __init__(self, key: str, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.deadline = float("inf")
        self._failure: PublicationFailed | None = None

    @property
    def failure(self) -> PublicationFailed | None:
        return self._failure.again() if self._failure is not None else None

    def check(self) -> None:
        if (failure := self.failure) is not None:
            raise failure

    def fail(self, why: str) -> PublicationFailed:
        """The channel's failure from now on; the first one stays."""
        if self._failure is None:
            what = f"communicator {self.key} failed at rank {self.rank}: {why}."
            self._failure = PublicationFailed(
                what, "the members that died are cut out and the publication is repeated."
            )
        return self._failure.again()
