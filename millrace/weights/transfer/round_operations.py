"""What one rank does with the messages of one round: pack, checksum, unpack, compare. On a CPU piece by piece; on a GPU
one kernel for each operation, whatever the number of pieces."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from millrace.weights.plans.memory import PieceInMessage, differing_pieces, pack, unpack
from millrace.weights.transfer.checksum import checksum


class RoundOperations(Protocol):
    """Made once for a plan, used for each version.

    On a GPU no method waits: the work is put on the current stream, and its results are read by `message_checksums` and
    `differing_counts` when it is done.
    """

    def pack(self) -> None:
        """Copies the pieces into their messages."""

    def unpack(self) -> None:
        """Copies the pieces out of their messages."""

    def sum_messages(self) -> None:
        """Takes the checksum of each message."""

    def compare(self) -> None:
        """Compares the pieces in memory with their messages."""

    def note_pieces(self) -> None:
        """Remembers the pieces as they are in their messages now, for `compare_noted`."""

    def compare_noted(self) -> None:
        """Compares the pieces in memory with what `note_pieces` remembered: a GPU reads each piece once, and no
        message."""

    @staticmethod
    def read_checksums(rounds: Sequence[Any]) -> Mapping[int, int]:
        """Results of `sum_messages` of several rounds of this class: message number → checksum."""
        ...

    @staticmethod
    def read_differing(rounds: Sequence[Any]) -> list[int]:
        """Results of `compare` and `compare_noted` since the last call, for each of several rounds of this class."""
        ...


class HostRoundOperations:
    """`RoundOperations` with torch, on a CPU or on any device without the kernels."""

    def __init__(self, pieces: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor]) -> None:
        self._pieces = pieces
        self._messages = messages
        self._checksums: dict[int, int] = {}
        self._differing = 0

    def pack(self) -> None:
        pack(self._pieces)

    def unpack(self) -> None:
        unpack(self._pieces)

    def sum_messages(self) -> None:
        self._checksums = {number: checksum(message) for number, message in self._messages.items()}

    def compare(self) -> None:
        self._differing += len(differing_pieces(self._pieces))

    def note_pieces(self) -> None:
        """Does nothing: `compare_noted` reads the messages again."""

    compare_noted = compare

    @staticmethod
    def read_checksums(rounds: Sequence["HostRoundOperations"]) -> Mapping[int, int]:
        return {number: value for operations in rounds for number, value in operations._checksums.items()}

    @staticmethod
    def read_differing(rounds: Sequence["HostRoundOperations"]) -> list[int]:
        found = [operations._differing for operations in rounds]
        for operations in rounds:
            operations._differing = 0
        return found


def message_checksums(rounds: Sequence[RoundOperations]) -> Mapping[int, int]:
    """Message number → checksum, for all messages of `rounds`. A GPU is read once, on the current stream: if an
    engine computes on that stream, this waits for the engine's batch."""
    return rounds[0].read_checksums(rounds) if rounds else {}


def differing_counts(rounds: Sequence[RoundOperations]) -> list[int]:
    """For each round, the number of pieces (or parts of them) that were found different since the last call. A GPU is
    read as `message_checksums` reads it."""
    return rounds[0].read_differing(rounds) if rounds else []


def round_operations(
    pieces: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor], device: torch.device
) -> RoundOperations:
    """The fastest implementation that `device` has; `messages` by number, [bytes, uint8] each."""
    if device.type == "cuda":
        from millrace.weights.transfer.kernels import CudaRoundOperations, supported

        if supported():
            return CudaRoundOperations(pieces, messages, device)
    return HostRoundOperations(pieces, messages)
