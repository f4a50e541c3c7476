"""What is done with one round's messages on one rank: packed, summed, unpacked, compared. On a CPU piece by piece; on a
GPU by one kernel for each, whatever the number of pieces."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from millrace.weights.plans import memory
from millrace.weights.plans.memory import PieceInMessage, pack, unpack
from millrace.weights.transfer.checksum import checksum


class RoundOperations(Protocol):
    """Prepared once, done for each version. On a GPU nothing waits: work is put on the current stream, and what it
    found is read, by `sums` and `differing`, when that is over."""

    def pack(self) -> None: ...

    def unpack(self) -> None: ...

    def sum(self) -> None:
        """Takes the checksum of each message."""

    def compare(self) -> None:
        """Looks whether the pieces lie where they belong as their messages say."""

    def note(self) -> None:
        """Keeps what `check` compares with: of the pieces as they are in their messages now."""

    def check(self) -> None:
        """As `compare`, by what was noted: a GPU reads each piece once, and no message."""

    @staticmethod
    def read_sums(batches: Sequence[Any]) -> Mapping[int, int]: ...

    @staticmethod
    def read_differing(batches: Sequence[Any]) -> list[int]: ...


class HostRoundOperations:
    def __init__(self, pairs: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor]) -> None:
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
        self._differing += len(memory.differing_pieces(self._pairs))

    def note(self) -> None:
        pass

    check = compare

    @staticmethod
    def read_sums(batches: Sequence["HostRoundOperations"]) -> Mapping[int, int]:
        return {number: value for done in batches for number, value in done._sums.items()}

    @staticmethod
    def read_differing(batches: Sequence["HostRoundOperations"]) -> list[int]:
        found = [done._differing for done in batches]
        for done in batches:
            done._differing = 0
        return found


def message_checksums(batches: Sequence[RoundOperations]) -> Mapping[int, int]:
    """Message number → checksum, of all of them. A GPU is read once, on the current stream: on one that an engine
    computes on, that waits for the engine's batch."""
    return batches[0].read_sums(batches) if batches else {}


def differing_counts(batches: Sequence[RoundOperations]) -> list[int]:
    """Of each, the pieces, or parts of such, that were found different since this was asked last. Read as `sums` is."""
    return batches[0].read_differing(batches) if batches else []


def round_operations(
    pairs: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor], device: torch.device
) -> RoundOperations:
    """The fastest that the device has."""
    if device.type == "cuda":
        from millrace.weights.transfer.kernels import CudaRoundOperations, supported

        if supported():
            return CudaRoundOperations(pairs, messages, device)
    return HostRoundOperations(pairs, messages)
