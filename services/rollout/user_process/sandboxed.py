"""What every process of a user's code does inside its sandbox: keep the pipes of the protocol, say what failed."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.rewards.locate import FunctionNotFound, parse, source_file
from millrace.sandbox.boundaries import Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view

LONGEST_FAILURE = 500


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keeps the two pipes for the protocol. User code prints to standard error, and its standard input is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


Lacking = Sequence[Sequence[str]]
"""Boundary and reason of each boundary that a process lacks."""
Serve = Callable[[Mapping[str, Any], IO[bytes], IO[bytes], Lacking], None]
"""What a process does once it is confined, from its setup and its pipes: it has to answer that it is ready, and which
boundaries it lacks."""


def confined(
    setup: Mapping[str, Any],
    pipes: tuple[IO[bytes], IO[bytes]],
    code: Iterable[Path],
    serve: Serve,
    *channels: int,
    **more: bool,
) -> None:
    """Goes on with `serve` inside the sandbox of the setup, which sees `code` and keeps the descriptors `channels`. If
    the process has to have every boundary and lacks some, it answers that and ends. `more`: see `Wanted`."""
    requests, replies = pipes
    seen = view([*code, *map(Path, setup["paths"])], setup["hidden"])
    kept = (requests.fileno(), replies.fileno(), *channels)

    def inside(missing: Sequence[Missing]) -> None:
        lacking = [[each.boundary, each.reason] for each in missing]
        if lacking and setup["required"]:
            reply(replies, {"uncontained": lacking})
        else:
            serve(setup, requests, replies, lacking)

    wanted = Wanted(seen, setup["memory_mb"], setup["network"], kept, **more)
    confine(wanted, setup["parent"], setup["control"], inside)


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
