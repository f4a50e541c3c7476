"""Standard output and error whose failures end nobody: a full disk costs lines, and nothing else."""

import logging
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast


class LossyStream:
    """A text stream that counts what it cannot write. The first write that succeeds again is followed by a warning with
    the number of writes that were lost."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = 0
        """Writes since the last one that succeeded."""
        self._why = ""

    def write(self, text: str) -> int:
        """Writes, as far as that is possible. What has no end of a line yet is kept, so that lines stay whole."""
        if self._done(lambda: self.stream.write(text)) and "\n" in text:
            self.flush()
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes what was kept, as far as that is possible."""
        if self._done(self.stream.flush) and (lost := self.lost):
            self.lost = 0  # first: the warning comes here too
            logging.getLogger(__name__).warning("%d writes to the log were lost: %s", lost, self._why)

    def _done(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except OSError as error:
            self.lost, self._why = self.lost + 1, error.strerror or str(error)
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def take_over_standard_streams() -> None:
    """From now on what this process prints cannot make it fail, whoever prints: a library's progress bar too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, cast(TextIO, LossyStream(stream)))
