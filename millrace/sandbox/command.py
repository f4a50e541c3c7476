"""Runs a program of a user inside a sandbox, with this process's standard input and output.

`python -m millrace.sandbox.command SETUP PROGRAM ARGUMENT...`, where SETUP is the JSON of `Limits`. The folders of the
program and of the files that are named as arguments can be seen inside. The sandbox ends with this process, and this
process with the one that started it. If a boundary is required that the machine does not give, the program is not
started and the exit status is UNCONTAINED.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.sandbox.boundaries import Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view

UNCONTAINED = 77
NOT_FOUND = 127


@dataclass(frozen=True)
class Limits:
    """What a program may have."""

    memory_mb: int
    network: bool
    required: bool
    """Whether to refuse a machine that does not give every boundary."""
    paths: tuple[str, ...] = ()
    """What it sees besides its own folders."""
    hidden: tuple[str, ...] = ()
    """What it does not see even there."""


def sandboxed(command: Sequence[str], limits: Limits) -> list[str]:
    """The command that runs `command` in a sandbox."""
    return [
        sys.executable,
        "-m",
        "millrace.sandbox.command",
        json.dumps(asdict(limits)),
        *command,
    ]


def main() -> None:
    limits, command = Limits(**json.loads(sys.argv[1])), sys.argv[2:]
    parent = os.getppid()
    channels = os.dup(0), os.dup(1)
    program = shutil.which(command[0])
    if program is None:
        print(f"{command[0]}: there is no such program on this host", file=sys.stderr)
        sys.exit(NOT_FOUND)
    named = [Path(each) for each in (program, *command) if os.path.isabs(each) and os.path.exists(each)]
    seen = view([*named, *map(Path, limits.paths)], limits.hidden)
    ours, theirs = socket.socketpair()
    wanted = Wanted(seen, limits.memory_mb, limits.network, channels)
    try:
        confine(wanted, parent, theirs.fileno(), lambda missing: _run(program, command, limits, channels, missing))
    finally:
        ours.close()


def _run(
    program: str, command: Sequence[str], limits: Limits, channels: tuple[int, int], missing: Sequence[Missing]
) -> None:
    if missing and limits.required:
        names = "; ".join(f"{each.boundary}: {each.reason}" for each in missing)
        print(f"reward.isolation is required, and this machine does not give {names}", file=sys.stderr)
        os._exit(UNCONTAINED)
    for number, channel in enumerate(channels):
        os.dup2(channel, number)
        os.close(channel)
    os.execv(program, list(command))


if __name__ == "__main__":
    main()
