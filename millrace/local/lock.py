"""One stack at a time on a state folder: its supervisor locks a file there."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import InvalidState

FILE = "lock"


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """The kernel releases the lock when this process ends, however it ends. Raises InvalidState if another has it."""
    with (folder / FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidState(
                f"another stack runs on the state folder {folder}.", "stop it, or give --state another folder."
            ) from error
        yield


def is_running(folder: Path) -> bool:
    """Whether a stack runs on the state folder."""
    try:
        with (folder / FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
