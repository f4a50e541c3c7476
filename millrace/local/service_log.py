"""What the services write: one file each under the state folder, and what matters of it on the console."""

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from millrace.local.folders import private_file, private_folder

LOUD = ("warning", "error", "critical")
TAIL_BYTES = 16_384


class GrowingFile:
    """A text file that another process appends to, read from the byte `read_to` on, line by line."""

    def __init__(self, path: Path, read_to: int = 0) -> None:
        self.path = path
        self._read_to = read_to
        self._rest = b""

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        self._read_to += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    @property
    def unfinished(self) -> str:
        """What was read of the line that is not complete yet."""
        return self._rest.decode(errors="replace")


def start_of_last_lines(path: Path, count: int) -> int:
    """The byte at which the last `count` lines of a file begin."""
    with path.open("rb") as file:
        if not (size := path.stat().st_size):
            return 0
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as text:
            at = size - 1 if text[-1:] == b"\n" else size
            for _ in range(count):
                at = text.rfind(b"\n", 0, at)
                if at < 0:
                    return 0
            return min(at + 1, size)


class ServiceLog:
    """The log file of one service, read as it grows."""

    def __init__(self, folder: Path, name: str) -> None:
        private_folder(folder)
        self.name = name
        self.path = folder / f"{name}.log"
        self._growing = GrowingFile(self.path, self.path.stat().st_size if self.path.exists() else 0)
        self._life_from = 0

    def opened(self, argv: tuple[str, ...]) -> IO[bytes]:
        """Opens the log for a new life of the service, which appends to it. A line marks where the new life begins."""
        file = self.to_append()
        with contextlib.suppress(OSError):  # the disk is full
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
        self._life_from = self.path.stat().st_size if self.path.exists() else 0
        return file

    def to_append(self) -> IO[bytes]:
        """The file, without a buffer; the null device if there is no room for a file."""
        try:
            return open(self.path, "ab", buffering=0, opener=private_file)
        except OSError as error:
            say("millrace", f"{self.path} cannot be written: {error.strerror}. What {self.name} prints is lost.")
            return open(os.devnull, "ab", buffering=0)

    def loud_lines(self) -> Iterator[str]:
        """What was written since the last call and deserves a person's attention."""
        for line in self._growing.new_lines():
            if text := loud(line):
                yield text

    def last_lines(self, count: int) -> list[str]:
        """The end of what this life of the service wrote."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(max(self._life_from, self.path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return [readable(line) for line in lines[-count:]]


def loud(line: str) -> str:
    """The line for the console if it is a warning or worse, otherwise nothing."""
    event = _event(line)
    if event is not None:
        return readable(line) if event.get("level") in LOUD else ""
    return line if line.startswith(("ERROR ", "CRITICAL ")) else ""


def readable(line: str, *, with_time: bool = False) -> str:
    """One of our JSON lines as a person reads it, with its time if wanted; any other line as it is."""
    event = _event(line)
    if event is None:
        return line
    trace = event.pop("exception", "")
    level, message = str(event.pop("level", "")).upper(), event.pop("event", "")
    details = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("timestamp", "logger", "service"))
    at = str(event.get("timestamp", "")) if with_time else ""
    text = " ".join(part for part in (at, level, str(message), details) if part)
    return f"{text}\n{trace}" if trace else text


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


COLOURS = {"coordinator": 36, "trainer": 35, "millrace": 1}


def sender(name: str, *, coloured: bool) -> str:
    """The name of a service as it stands before each of its lines."""
    return f"\x1b[{COLOURS.get(name, 32)}m{name:>11} |\x1b[0m" if coloured else f"{name:>11} |"


def say(name: str, text: str) -> None:
    """Prints `text` with its sender before each line. A console that went away is no reason to fail."""
    prefix = sender(name, coloured=sys.stderr.isatty())
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines():
            print(prefix, line, file=sys.stderr, flush=True)
