"""One life of a service's processes, as whoever starts them sees it: whether they joined the fleet, how they ended."""

import contextlib
import json
import os
import stat
from pathlib import Path

from millrace.local.service_log import loud
from millrace.wire.last_words import MEMBER, PREVIOUS, STACKS

LONGEST = 4000
"""Characters that the next life tells."""
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
    """Bytes on this process' standard error, which its children share, where that is a file."""
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def _tail(begin: int) -> list[str]:
    """The last lines on the standard error since the byte `begin`, without the log's ordinary ones; none where the
    standard error is no file."""
    if (end := _written()) <= begin:
        return []
    with contextlib.suppress(OSError), Path("/proc/self/fd/2").open("rb") as file:
        file.seek(max(begin, end - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return [told for line in lines if (told := loud(line) if line.startswith("{") else line)][-LINES:]
    return []
