"""What a process leaves for its next life. Its launcher keeps how it ended (`millrace/local/lives.py`).

The processes of one service share a folder with their launcher. A process that a signal ends writes Python's stack
there. The next life reports it to the coordinator when it registers, so that the job whose work ended the process can
say why.
"""

import faulthandler
import json
import os
from pathlib import Path
from typing import IO

from millrace.contracts.v1 import fleet_pb2

FOLDER = "MILLRACE_LAST_WORDS"
"""Environment variable with the path of the folder."""
MEMBER, PREVIOUS, STACKS = "member", "previous.json", "*.stack"
"""Files of the folder: the id of the member that this life has become; how the life before ended, as JSON of a
PreviousLife; the stack of each process that a signal ended."""
_open_stacks: list[IO[str]] = []
"""They stay open as long as the process lives."""


def listen() -> None:
    """Called in a process of the service: if a signal ends it, its stack is left behind."""
    if (folder := _folder()) is not None:
        _open_stacks.append((folder / f"{os.getpid()}.stack").open("w"))
        faulthandler.enable(_open_stacks[-1], all_threads=False)


def joined(member_id: str) -> None:
    """Called in a process of the service that has become a member of the fleet."""
    if (folder := _folder()) is not None:
        (folder / MEMBER).write_text(member_id)


def previous() -> fleet_pb2.PreviousLife | None:
    """How the life before this one ended; None if there was none, or it ended in order."""
    if (folder := _folder()) is None:
        return None
    try:
        return fleet_pb2.PreviousLife(**json.loads((folder / PREVIOUS).read_text()))
    except (OSError, ValueError):
        return None


def _folder() -> Path | None:
    path = os.environ.get(FOLDER)
    return Path(path) if path else None
