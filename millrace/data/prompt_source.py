"""What prompts come from: rows by number, files that have them, and an order for every pass.

The order of a pass is a permutation that depends only on the seed, the pass and the number of rows. It is the same on
every machine and with every release of Python and numpy, because rows are sorted by a hash of their number (splitmix64
keyed by seed and pass). A job that is resumed on another machine has the same order.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from millrace.data.columns.layout import Layout
from millrace.data.row import PromptRow
from millrace.errors import BadRow


class Order(Sequence[int]):
    """The row numbers 0 .. length - 1 in the order of one pass, computed at the first access."""

    def __init__(self, length: int, pass_number: int, seed: int, shuffle: bool) -> None:
        self._length = length
        self._key = f"{seed}/{pass_number}"
        self._shuffle = shuffle

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [int(row) for row in self._rows[place]]
        return int(self._rows[place])

    def __iter__(self) -> Iterator[int]:
        return (int(row) for row in self._rows)

    @cached_property
    def _rows(self) -> range | NDArray[np.unsignedinteger]:
        if not self._shuffle:
            return range(self._length)
        key = int.from_bytes(hashlib.blake2b(self._key.encode(), digest_size=8).digest(), "little")
        order = np.argsort(_splitmix64(key, self._length), kind="stable")
        return order.astype(np.uint32 if self._length <= 2**32 else np.uint64)


def _splitmix64(key: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of the generator splitmix64 (Steele, Lea and Flood, 2014), started at `key`."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class PromptSource(ABC):
    """Prompts by number. A number stands for the same row as long as the files, or the task and its options, are the
    same."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> PromptRow:
        """The row with this number. Raises BadRow for an unusable row, IndexError past the end. Thread-safe."""

    @property
    def description(self) -> list[str]:
        """Lines for people: what of the data is taken for what."""
        return []

    @property
    def fingerprint(self) -> str:
        """The same as long as the rows are; empty where the job spec alone says what they are."""
        return ""

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    def scan(self) -> Iterator[PromptRow | BadRow]:
        """Every row in the order of its number, or why it is unusable. Reads a file from its beginning to its end."""
        for index in range(len(self)):
            try:
                yield self[index]
            except BadRow as error:
                yield error

    def order(self, pass_number: int, seed: int, shuffle: bool) -> Order:
        """The row numbers of one pass in their order, which depends only on the arguments and on the number of rows."""
        return Order(len(self), pass_number, seed, shuffle)


class RowFile(ABC):
    """One open file of rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Names of the columns. Raises BadRow if the first row, which has them, cannot be read."""

    @abstractmethod
    def fitted(self, layout: Layout) -> Layout:
        """The layout for the types of this file, which reads rows by it from now on. Raises InvalidJob for a column of
        a type that no valid row can have."""

    @abstractmethod
    def raw(self, row: int) -> Any:
        """The row as the file holds it, in plain Python types. Raises BadRow if it cannot be read."""

    @abstractmethod
    def place(self, row: int) -> str:
        """The file and the row, for errors."""

    def scan(self) -> Iterator[Any | BadRow]:
        """Every row in order as `raw` gives it, or why it cannot be read."""
        return self._one_by_one(0)

    def _one_by_one(self, first: int) -> Iterator[Any | BadRow]:
        for row in range(first, len(self)):
            try:
                yield self.raw(row)
            except BadRow as error:
                yield error
