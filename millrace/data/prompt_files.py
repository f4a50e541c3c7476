"""Prompts in Parquet and JSON files."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from millrace.data.columns.layout import Layout, Reading, layout_of
from millrace.data.fingerprint import fingerprint
from millrace.data.prompt_source import PromptSource, RowFile
from millrace.data.row import PromptRow, read_row
from millrace.errors import BadRow, InvalidJob, Mistake, refused

PARQUET = (".parquet", ".pq")
JSONL = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))


@dataclass(frozen=True)
class _File:
    rows: RowFile
    path: str
    layout: Layout


class PromptFiles(PromptSource):
    """The rows of several files, one file after another."""

    def __init__(self, files: Sequence[_File], reading: Reading, field: str, fingerprint: str) -> None:
        self._files, self._reading, self._fingerprint = files, reading, fingerprint
        self._ends = list(accumulate(len(file.rows) for file in files))
        starts = [0, *self._ends[:-1]]
        mistakes, self._plain = [], False
        for first in starts:
            try:
                self._plain |= isinstance(self[first].prompt, str)
            except BadRow as error:
                mistakes.append(_mistake(field, error))
        if mistakes:
            raise InvalidJob.of(mistakes)

    @property
    def description(self) -> list[str]:
        """See `PromptSource.description`. Files that are read alike share a line."""
        alike: dict[str, list[str]] = {}
        for file in self._files:
            alike.setdefault(str(file.layout), []).append(file.path)
        lines = [
            f"{paths[0] if len(paths) == 1 else f'{paths[0]} and {len(paths) - 1} more'}: {taken}"
            for taken, paths in alike.items()
        ]
        if self._plain:
            asked = self._reading.prompt_format == "text"
            choice = "" if asked else "; data.prompt_format: chat makes each the message of a user instead"
            lines.append(f"prompts that are plain text go to the model as they are, without a chat template{choice}")
        return lines

    @property
    def fingerprint(self) -> str:
        """See `PromptSource.fingerprint`."""
        return self._fingerprint

    def scan(self) -> Iterator[PromptRow | BadRow]:
        """See `PromptSource.scan`."""
        index = 0
        for file in self._files:
            for row, raw in enumerate(file.rows.scan()):
                try:
                    yield raw if isinstance(raw, BadRow) else self._read(index, raw, file, row)
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
        return self._read(index, file.rows.raw(row), file, row)

    def _read(self, index: int, raw: Any, file: _File, row: int) -> PromptRow:
        return read_row(index, raw, file.rows.place(row), file.layout, self._reading)


def open_files(paths: Sequence[str], field: str, reading: Reading) -> PromptFiles:
    """The rows of the files. Raises InvalidJob, which names `field` of the job spec, with the mistakes of all files."""
    for path in paths:
        if not path.endswith(PARQUET + JSONL):
            fix = f"name a file that ends in {', '.join(PARQUET + JSONL)}."
            raise refused(field, path, "the ending of the name is not that of a known format", fix)
        if not Path(path).is_file():
            found = "is a folder" if Path(path).is_dir() else f"there is no file {Path(path).absolute()}"
            raise refused(field, path, found, "give the path of a data file that this service can read.")
    files, mistakes = list[_File](), list[Mistake]()
    for path, rows in zip(paths, _open_formats(paths, field), strict=True):
        try:
            if not len(rows):
                raise refused(field, path, "has no rows", "leave it out, or write the data again.")
            has_images = reading.most_images is not None
            layout = rows.fitted(layout_of(rows.columns, reading.columns, path, field, images=has_images))
            files.append(_File(rows, path, layout))
        except InvalidJob as error:
            mistakes += error.mistakes
        except BadRow as error:
            mistakes.append(_mistake(field, error))
    if mistakes:
        raise InvalidJob.of(list(dict.fromkeys(mistakes)))
    try:
        content = fingerprint(paths)
    except OSError as error:
        fix = "write the file again, or change its permissions."
        raise refused(field, str(error.filename), f"cannot be read: {error.strerror}", fix) from error
    return PromptFiles(files, reading, field, content)


def _mistake(field: str, error: BadRow) -> Mistake:
    return Mistake(field, error.what.removesuffix("."), error.fix)


def _open_formats(paths: Sequence[str], field: str) -> list[RowFile]:
    """The opened files. The library of a format is imported only if a file has that format."""
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
