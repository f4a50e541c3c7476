"""Reads a pickle without running anything that it names.

The index of a distributed checkpoint is a pickle of torch's and Megatron's dataclasses. Here no class and no function
of a pickle is imported: each is replaced by a class that keeps the values that it is given, and can do nothing else.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}
"""Classes whose values are needed as such."""


class Record:
    """An object of a class that was not imported. Its attributes are those of the pickled object."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})
        else:
            self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dictionary of an unknown class are not needed."""

    def append(self, value: Any) -> None:
        """Nor are those of a list."""

    def extend(self, values: Any) -> None:
        """See `append`."""


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        return name if module == "torch" else Record  # torch's dtypes are such names: float32


def read_pickle(path: Path) -> Any:
    """The pickled object, with a `Record` for each object of an unknown class, and the name for each dtype. Raises
    OSError, and ValueError for what is not a pickle."""
    with path.open("rb") as file:
        try:
            return _Inert(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"is not an index of torch's distributed checkpoints ({error})") from error
