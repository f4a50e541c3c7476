"""What every process of a user's code does inside its sandbox: keep the pipes of the protocol, say what failed."""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.rewards.locate import FunctionNotFound, parse, source_file

LONGEST_FAILURE = 500


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keeps the two pipes for the protocol. User code prints to standard error, and its standard input is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def refuses(setup: Mapping[str, Any], missing: Sequence[Sequence[str]], replies: IO[bytes]) -> bool:
    """Whether the process is not to run, since it has to have every boundary and lacks some; then it is answered."""
    if missing and setup["required"]:
        reply(replies, {"uncontained": missing})
        return True
    return False


def code_of(function: str) -> list[Path]:
    """What the sandbox has to see for the function: its file, or the package that holds its module."""
    try:
        target = parse(function)
        file = source_file(target)
    except FunctionNotFound:
        return []  # a built-in reward, or one that `load` refuses
    if file is None:
        return []
    inner = 0 if target.is_file else target.place.count(".") + (file.name == "__init__.py")
    return [file.parents[inner - 1] if inner else file]


def left_processes() -> bool:
    """Whether the function has started processes that still run. After a failure they would be in the way of the next
    call."""
    alone = {"1", str(os.getpid())}
    return os.getppid() == 1 and any(name.isdigit() and name not in alone for name in os.listdir("/proc"))


def describe_error(error: BaseException) -> str:
    """An exception of user code as text: `raised ValueError: no digits (mine.py, line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = f"raised {type(error).__name__}: {error}"
    return text[:LONGEST_FAILURE] + where


def reply(replies: IO[bytes], message: Mapping[str, Any]) -> None:
    """Sends one message to the replica."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()
