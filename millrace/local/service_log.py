"""What the services write: one file each under the state folder, and what matters of it on the console."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LOUD = ("warning", "error", "critical")
TAIL_BYTES = 16_384


class ServiceLog:
    """The log file of one service, read as it grows."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.path = folder / f"{name}.log"
        self._read_to = self.path.stat().st_size if self.path.exists() else 0
        self._rest = b""
        self._life_from = 0

    def opened(self, argv: tuple[str, ...]) -> IO[bytes]:
        """For a new life of the service to append to; a line of its own tells it from the one before."""
        file = self.path.open("ab")
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
        file.flush()
        self._life_from = file.tell()
        return file

    def loud_lines(self) -> Iterator[str]:
        """What was written since the last call and deserves a person's attention."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        self._read_to += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            if told := loud(line.decode(errors="replace")):
                yield told

    def last_lines(self, count: int) -> list[str]:
        """The end of what this life of the service wrote."""
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


def readable(line: str) -> str:
    """One of our JSON lines as a person reads it; any other line as it is."""
    event = _event(line)
    if event is None:
        return line
    trace = event.pop("exception", "")
    level, message = str(event.pop("level", "")).upper(), event.pop("event", "")
    details = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("timestamp", "logger", "service"))
    told = " ".join(part for part in (level, str(message), details) if part)
    return f"{told}\n{trace}" if trace else told


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


COLOURS = {"coordinator": 36, "trainer": 35, "millrace": 1}


def say(name: str, text: str) -> None:
    """Prints `text` with its sender before each line. A console that went away is no reason to fail."""
    colour = COLOURS.get(name, 32)
    prefix = f"\x1b[{colour}m{name:>11} |\x1b[0m" if sys.stderr.isatty() else f"{name:>11} |"
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines():
            print(prefix, line, file=sys.stderr, flush=True)
