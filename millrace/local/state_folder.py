"""The state folder of a stack: its supervisor locks a file there, so that one stack at a time runs on it, and takes
from another file how many replicas `millrace scale` asks for. It answers in `stack.json`.
"""

import contextlib
import fcntl
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.errors import InvalidState, Unavailable

FILE = "lock"
STATE = "stack.json"
REQUEST = "scale.json"
ANSWER_S = 15.0
"""How long the supervisor may take to answer."""
LOOK_S = 0.1


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


@dataclass(frozen=True)
class Asked:
    """The number of replicas that somebody asks for."""

    replicas: int
    key: str
    """Names the request in its answer."""


def span(text: str, most: int) -> tuple[int, int] | None:
    """The two numbers of `MIN:MAX`, or twice that of `N`; None for anything else, and beyond `most`."""
    numbers = [int(each) if each.isascii() and each.isdigit() else -1 for each in text.split(":")]
    if len(numbers) > 2 or not 0 <= numbers[0] <= numbers[-1] <= most:
        return None
    return numbers[0], numbers[-1]


def asked(folder: Path) -> Asked | None:
    """The newest request."""
    try:
        return Asked(**json.loads((folder / REQUEST).read_text()))
    except FileNotFoundError:
        return None


def scale(folder: Path, replicas: int) -> list[str]:
    """Asks the supervisor for this number of replicas. Answers the names of those that the supervisor starts or drains
    now. Raises InvalidState if no stack runs on the folder or this host has too few GPUs, Unavailable if nobody
    answers."""
    if not is_running(folder):
        what = f"no stack runs on the state folder {folder}."
        raise InvalidState(what, "start one with `millrace up`, or name the folder of one with --state.")
    request = Asked(replicas, secrets.token_hex(8))
    scratch = (folder / REQUEST).with_suffix(".part")
    scratch.write_text(json.dumps(asdict(request)))
    scratch.replace(folder / REQUEST)
    deadline = time.monotonic() + ANSWER_S
    while (answer := read_state(folder).get("scale", {})).get("key") != request.key:
        if time.monotonic() > deadline:
            what = f"the supervisor of the stack on {folder} has not answered for {ANSWER_S:g} s."
            raise Unavailable(what, "look at its console.")
        time.sleep(LOOK_S)
    if "what" in answer:
        raise InvalidState(answer["what"], answer["fix"])
    return list(answer["changed"])


def read_state(folder: Path) -> dict[str, Any]:
    """What the supervisor wrote last."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
