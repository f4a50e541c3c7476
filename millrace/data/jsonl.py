"""JSON, as lines or as one array, plain or compressed: the text stays on disk, an index of where rows start is in
memory."""

import gzip
import json
import re
import shutil
import tempfile
import threading
import zlib
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import IO, Any

from millrace.data.columns.layout import Layout
from millrace.data.columns.values import Values
from millrace.data.prompt_source import RowFile
from millrace.errors import BadRow, refused

PACKED = (".gz", ".zst")
LOOKED_AT = 100
"""Rows, from the first one, whose names are the columns of the file."""
COPIED = 1 << 20
SPACE = re.compile(r"[ \t\r\n]*")


class JsonlRows(RowFile):
    """One object per line; blank lines are skipped. A `.json` file may be one array of objects instead. A compressed
    file, and an array, is written once as lines to an unnamed temporary file."""

    def __init__(self, path: str, field: str) -> None:
        self._path = path
        self._reading = threading.Lock()
        self._starts = array("Q")
        self._line_numbers = array("Q")
        self._called = "line"
        try:
            self._file = _unpacked(path)
            if _is_array(path, self._file):
                self._file, self._called = _lines(self._file), "element"
            self._index()
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fix = "write the file again, or change its permissions."
            raise refused(field, path, f"cannot be read: {reason}", fix) from error
        except (ValueError, RecursionError) as error:
            raise refused(field, path, f"is not a JSON array: {error}", "write the file again.") from error

    def _index(self) -> None:
        start = 0
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._starts.append(start)
                self._line_numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def columns(self) -> Sequence[str]:
        Values(first := self.raw(0), self.place(0))
        rows = [first, *(row for row in islice(self.scan(), 1, LOOKED_AT) if not isinstance(row, BadRow))]
        return list(dict.fromkeys(str(name) for row in rows if isinstance(row, dict) for name in row))

    def fitted(self, layout: Layout) -> Layout:
        return layout

    def raw(self, row: int) -> Any:
        with self._reading:
            self._file.seek(self._starts[row])
            line = self._file.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            fix = "write one JSON object per line, or a .json file with one array of objects."
            raise BadRow(f"{self.place(row)}: is not JSON: {error}.", fix) from error

    def place(self, row: int) -> str:
        return f"{self._path} {self._called} {self._line_numbers[row]}"


def _unpacked(path: str) -> IO[bytes]:
    if not path.endswith(PACKED):
        return open(path, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as its owner
    if path.endswith(".gz"):
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, file, COPIED)
    else:
        import pyarrow as pa

        with pa.input_stream(path, compression="zstd") as packed:
            while block := packed.read(COPIED):
                file.write(block)
    file.seek(0)
    return file


def _is_array(path: str, file: IO[bytes]) -> bool:
    """Whether the file is one array. Lines that are arrays are bad rows of a file of lines."""
    if not any(path.endswith(".json" + packed) for packed in ("", *PACKED)):
        return False
    start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _lines(file: IO[bytes]) -> IO[bytes]:
    """A file with each element of the array as a line. Raises ValueError, RecursionError."""
    with file:
        text = file.read().decode("utf-8-sig")
    lines = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as its owner
    decoder, place = json.JSONDecoder(), _next(text, 0) + 1
    if text[(place := _next(text, place)) : place + 1] == "]":
        return lines
    while True:
        element, place = decoder.raw_decode(text, place)
        lines.write(json.dumps(element).encode() + b"\n")
        separator = text[(place := _next(text, place)) : place + 1]
        if separator != ",":
            break
        place = _next(text, place + 1)
    if separator != "]" or _next(text, place + 1) != len(text):
        raise ValueError(f"no , and no end of the array at character {place}")
    lines.seek(0)
    return lines


def _next(text: str, place: int) -> int:
    """The place of the next character that is not white space."""
    found = SPACE.match(text, place)
    return found.end() if found is not None else place
