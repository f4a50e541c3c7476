"""Prompts in Parquet and JSONL files."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from millrace.data.prompt_source import PromptSource
from millrace.data.row import PromptRow, read_row
from millrace.errors import BadRow, InvalidJob, Mistake, refused

PARQUET = (".parquet", ".pq")
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


class RowFile(Protocol):
    """One open file of rows."""

    def __len__(self) -> int: ...

    def raw(self, row: int) -> Any:
        """The row as the file holds it, in plain Python types. Raises BadRow where it cannot be read."""

    def place(self, row: int) -> str:
        """The file and the row, for errors."""

    def scan(self) -> Iterator[Any | BadRow]:
        """Every row in order as `raw` gives it, or why it cannot be read."""


class PromptFiles(PromptSource):
    """The rows of several files, one file after another."""

    def __init__(self, files: Sequence[RowFile], field: str) -> None:
        self._files = files
        self._ends = list(accumulate(len(file) for file in files))
        for first in [0, *self._ends[:-1]]:
            try:
                self[first]
            except BadRow as error:
                raise InvalidJob.of([Mistake(field, error.what.removesuffix("."), error.fix)]) from error

    def scan(self) -> Iterator[PromptRow | BadRow]:
        """See `PromptSource.scan`."""
        index = 0
        for file in self._files:
            for row, raw in enumerate(file.scan()):
                try:
                    yield raw if isinstance(raw, BadRow) else read_row(index, raw, file.place(row))
                except BadRow as error:
                    yield error
                index += 1

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        file = self._files[which]
        row = index - (self._ends[which - 1] if which else 0)
        return read_row(index, file.raw(row), file.place(row))


def open_files(paths: Sequence[str], field: str) -> PromptFiles:
    """The rows of the files. Raises InvalidJob, which names `field` of the job spec."""
    for path in paths:
        if not path.endswith(PARQUET + JSONL):
            fix = f"name a file that ends in {', '.join(PARQUET + JSONL)}."
            raise refused(field, path, "the ending of the name is not that of a known format", fix)
        if not Path(path).is_file():
            found = "is a folder" if Path(path).is_dir() else f"there is no file {Path(path).absolute()}"
            raise refused(field, path, found, "give the path of a data file that this service can read.")
    files = _open_formats(paths, field)
    for path, file in zip(paths, files, strict=True):
        if not len(file):
            raise refused(field, path, "has no rows", "leave it out, or write the data again.")
    return PromptFiles(files, field)


def _open_formats(paths: Sequence[str], field: str) -> list[RowFile]:
    """The opened files. The library of a format is imported only where a file has that format."""
    files: list[RowFile] = []
    cache = None
    for path in paths:
        if path.endswith(PARQUET):
            from millrace.data.parquet import ParquetRows, RowGroupCache

            cache = cache or RowGroupCache()
            files.append(ParquetRows(path, field, cache))
        else:
            from millrace.data.jsonl import JsonlRows

            files.append(JsonlRows(path, field))
    return files
