"""Sources of prompts: files one after another, or a procedural task."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from millrace.data.order import Order
from millrace.data.row import PromptRow, read_row
from millrace.errors import BadRow, InvalidJob, refused

PARQUET = (".parquet", ".pq")
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


class Source(ABC):
    """Rows by number. The same number is the same row for as long as the files, or task and options, are the same."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> PromptRow:
        """Raises BadRow for a row that cannot be used, IndexError past the end. Safe to call from several threads."""

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    def order(self, pass_number: int, seed: int, shuffle: bool) -> Order:
        """Which row stands at which place in a pass: a function of these three and the length alone."""
        return Order(len(self), pass_number, seed, shuffle)


class RowFile(Protocol):
    """One open file of rows."""

    def __len__(self) -> int: ...

    def raw(self, row: int) -> Any:
        """What the file holds there, as plain Python. Raises BadRow where it cannot be read."""

    def place(self, row: int) -> str:
        """File and row, for errors."""


def open_source(
    files: Sequence[str | Path] = (),
    procedural: str | None = None,
    procedural_options: Mapping[str, Any] | None = None,
    *,
    field: str = "data",
) -> Source:
    """Opens `files`, or `reasoning_gym:<task>` with its options (`size`, `seed` and those of the task).

    `field` is the part of the job spec that errors speak of. Raises InvalidJob for files that are missing, empty or
    not in verl's columns, and for a task or options that do not exist.
    """
    if bool(files) == bool(procedural):
        raise refused(
            f"{field}.files", [str(f) for f in files], "give either files or a procedural source", "keep one."
        )
    if procedural:
        from millrace.data.procedural import ReasoningGym

        return ReasoningGym(procedural, procedural_options or {}, field)
    return FileSource(_open([str(file) for file in files], f"{field}.files"), f"{field}.files")


class FileSource(Source):
    """The rows of several files, the first file's first."""

    def __init__(self, files: Sequence[RowFile], field: str) -> None:
        self._files = files
        self._ends = list(accumulate(len(file) for file in files))
        for first in [0, *self._ends[:-1]]:
            try:
                self[first]
            except BadRow as error:
                raise InvalidJob(f"{field}: the first row is not valid: {error.what}", error.fix) from error

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        file = self._files[which]
        row = index - (self._ends[which - 1] if which else 0)
        return read_row(index, file.raw(row), file.place(row))


def _open(paths: Sequence[str], field: str) -> list[RowFile]:
    for path in paths:
        if not path.endswith(PARQUET + JSONL):
            fix = f"name a file that ends in {', '.join(PARQUET + JSONL)}."
            raise refused(field, path, "the ending of its name tells no format", fix)
        if not Path(path).is_file():
            found = "it is a folder" if Path(path).is_dir() else f"there is no file {Path(path).absolute()}"
            raise refused(field, path, found, "give the path of a data file that this service can read.")
    files = _open_formats(paths, field)
    for path, file in zip(paths, files, strict=True):
        if not len(file):
            raise refused(field, path, "it has no rows", "leave it out, or write the data again.")
    return files


def _open_formats(paths: Sequence[str], field: str) -> list[RowFile]:
    """Imports a format's library only where a file has that format."""
    files: list[RowFile] = []
    held = None
    for path in paths:
        if path.endswith(PARQUET):
            from millrace.data.parquet import HeldGroups, ParquetRows

            held = held or HeldGroups()
            files.append(ParquetRows(path, field, held))
        else:
            from millrace.data.jsonl import JsonlRows

            files.append(JsonlRows(path, field))
    return files
