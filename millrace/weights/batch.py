"""What is done with one round's messages on one rank: packed, summed, unpacked, compared. On a CPU piece by piece; on a
GPU by one kernel for each, whatever the number of pieces."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from millrace.weights.checksum import checksum
from millrace.weights.memory import Pair, differing, pack, unpack


class Batch(Protocol):
    """Prepared once, done for each version. On a GPU nothing waits: work is put on the current stream, and `sums` and
    `differing` are read when that is over."""

    def pack(self) -> None: ...

    def unpack(self) -> None: ...

    def sum(self) -> None:
        """Takes the checksum of each message."""

    def compare(self) -> None:
        """Looks whether the pieces lie where they belong as their messages say."""

    def sums(self) -> Mapping[int, int]:
        """Message number → checksum."""

    def differing(self) -> int:
        """Pieces, or parts of such, that were found different since this was asked last."""


class HostBatch:
    def __init__(self, pairs: Sequence[Pair], messages: Mapping[int, torch.Tensor]) -> None:
        self._pairs = pairs
        self._messages = messages
        self._sums: dict[int, int] = {}
        self._differing = 0

    def pack(self) -> None:
        pack(self._pairs)

    def unpack(self) -> None:
        unpack(self._pairs)

    def sum(self) -> None:
        self._sums = {number: checksum(message) for number, message in self._messages.items()}

    def compare(self) -> None:
        self._differing += len(differing(self._pairs))

    def sums(self) -> Mapping[int, int]:
        return self._sums

    def differing(self) -> int:
        found, self._differing = self._differing, 0
        return found


def batch(pairs: Sequence[Pair], messages: Mapping[int, torch.Tensor], device: torch.device) -> Batch:
    """The fastest that the device has."""
    if device.type == "cuda":
        from millrace.weights.kernels import CudaBatch, supported

        if supported():
            return CudaBatch(pairs, messages, device)
    return HostBatch(pairs, messages)
