"""The program of a command: whether it is here, and which files it needs."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from millrace.errors import refused
from millrace.spec.environment import Agent

FIELD = "rollout.agent.command"


def check_command(agent: Agent) -> None:
    """Raises InvalidJob where there is no such program here."""
    if agent.command and shutil.which(agent.command[0]) is None:
        fix = "give the absolute path of a program that every replica's host has, or its name in their PATH."
        raise refused(FIELD, agent.command[0], "there is no such program", fix)


def code_of(command: Sequence[str]) -> list[str]:
    """The files and folders that the words of a command name, and the virtual environment that a program lies in."""
    program = shutil.which(command[0])
    named = [Path(word) for word in [program or "", *command[1:]] if os.path.isabs(word) and os.path.exists(word)]
    roots = [path.parents[1] for path in named if (path.parent.parent / "pyvenv.cfg").is_file()]
    return [str(path) for path in [*named, *roots]]
