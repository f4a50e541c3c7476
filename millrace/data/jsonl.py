"""JSON lines, plain or gzipped: the text stays on disk, an index of where lines start is in memory."""

import gzip
import json
import shutil
import tempfile
import threading
import zlib
from array import array
from collections.abc import Iterator
from typing import IO, Any

from millrace.errors import BadRow, refused


class JsonlRows:
    """One object per line; blank lines are skipped. A gzipped file is unpacked once, to an unnamed temporary file."""

    def __init__(self, path: str, field: str) -> None:
        self._path = path
        self._reading = threading.Lock()
        self._starts = array("Q")
        self._line_numbers = array("Q")
        try:
            self._file = _unpacked(path) if path.endswith(".gz") else open(path, "rb")  # noqa: SIM115 lives as long as self
            self._index()
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fix = "write the file again, or change its permissions."
            raise refused(field, path, f"cannot be read: {reason}", fix) from error

    def _index(self) -> None:
        start = 0
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._starts.append(start)
                self._line_numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, row: int) -> Any:
        """See `RowFile.raw`."""
        with self._reading:
            self._file.seek(self._starts[row])
            line = self._file.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{self.place(row)}: is not JSON: {error}.", "write one JSON object per line.") from error

    def scan(self) -> Iterator[Any | BadRow]:
        """See `RowFile.scan`."""
        for row in range(len(self)):
            try:
                yield self.raw(row)
            except BadRow as error:
                yield error

    def place(self, row: int) -> str:
        """See `RowFile.place`."""
        return f"{self._path} line {self._line_numbers[row]}"


def _unpacked(path: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as its owner
    with gzip.open(path) as packed:
        shutil.copyfileobj(packed, file, 1 << 20)
    file.seek(0)
    return file
