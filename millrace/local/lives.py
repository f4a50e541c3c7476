"""One life of a service's processes, as their launcher sees it: whether they joined the fleet, how they ended, and how
soon the next life begins."""

import contextlib
import json
import os
import stat
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from millrace.local.service_log import loud
from millrace.wire.last_words import MEMBER, PREVIOUS, STACKS


@dataclass
class Restarts:
    """Each restart comes after a longer wait than the one before, up to a bound.

    A process that dies before it has joined the fleet cannot run here: it is started again at most `limit` times within
    `window_s`. One that had joined is always started again. What it died of may be a job's fault, and it is the
    coordinator that counts the deaths of each job and ends the job, not the service.
    """

    limit: int = 5
    window_s: float = 600.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0
    longest_wait_joined_s: float = 3.0
    """Bound of the wait after a life that had joined: another job may wait for the service."""
    _when: deque[tuple[float, bool]] = field(default_factory=deque)

    def wait_s(self, now_s: float, *, joined: bool = False, least_s: float = 0.0) -> float | None:
        """Seconds to wait before the restart of a process that died at `now_s`, at least `least_s`, after it had
        `joined` the fleet or not; None: give up."""
        while self._when and now_s - self._when[0][0] > self.window_s:
            self._when.popleft()
        if not joined and self.used >= self.limit:
            return None
        longest = self.longest_wait_joined_s if joined else self.longest_wait_s
        doublings = min(len(self._when), 30)
        self._when.append((now_s, joined))
        return max(least_s, min(longest, self.first_wait_s * 2.0**doublings))

    @property
    def used(self) -> int:
        """Restarts within the window that count against the limit."""
        return sum(not joined for _, joined in self._when)

    @property
    def last_restart(self) -> str:
        """The last restart, for people."""
        if self._when and self._when[-1][1]:
            return f"{len(self._when)} times in {self.window_s / 60:g} min"
        return f"{self.used} of {self.limit} times"


LONGEST = 4000
"""Characters of the last output that the next life reports."""
LINES = 12
"""Lines of the standard error that are kept."""
TAIL_BYTES = 16_384
STACK_LINES = 20
"""Lines of a stack that are kept: the innermost calls come first."""


class Life:
    """Begins when it is made. `folder` is that of `millrace.wire.last_words`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / MEMBER, *folder.glob(STACKS)):
            file.unlink(missing_ok=True)
        self._begin = _written()

    @property
    def joined(self) -> bool:
        """Whether its processes became a member of the fleet."""
        return joined(self._folder)

    def end(self, ended: str) -> None:
        """Keeps for the next life how this one ended. Empty: in order."""
        file = self._folder / PREVIOUS
        if not ended or not self.joined:
            file.unlink(missing_ok=True)
            return
        stacks = [path.read_text(errors="replace").splitlines() for path in sorted(self._folder.glob(STACKS))]
        words = [line for stack in stacks for line in stack[:STACK_LINES]] or _tail(self._begin)
        kept = {"member_id": (self._folder / MEMBER).read_text(), "ended": ended}
        file.write_text(json.dumps({**kept, "last_words": "\n".join(words)[-LONGEST:]}))


def joined(folder: Path) -> bool:
    """Whether the last life in `folder` became a member of the fleet."""
    return (folder / MEMBER).exists()


def _written() -> int:
    """Bytes on this process' standard error, which its children share, if that is a file."""
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def _tail(begin: int) -> list[str]:
    """The last lines on the standard error since the byte `begin`, without the log's ordinary ones; none if the
    standard error is no file."""
    if (end := _written()) <= begin:
        return []
    with contextlib.suppress(OSError), Path("/proc/self/fd/2").open("rb") as file:
        file.seek(max(begin, end - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return [text for line in lines if (text := loud(line) if line.startswith("{") else line)][-LINES:]
    return []
