"""What prompts come from: rows by number, and an order for every pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from millrace.data.order import Order
from millrace.data.row import PromptRow
from millrace.errors import BadRow


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
