"""Programs that nobody has looked at, such as the answers of a model, run one after the other in sandboxes.

    with ProgramSandbox(Room(memory_mb=256)) as sandbox:
        ended = sandbox.run(Program("print(input())", input="3"), timeout_s=5.0)

A sandbox may be made inside another one, if it needs a user namespace. It always has every boundary; a machine that
does not give one raises Uncontained. What a program does to itself, its limits or its sandbox is reported by `Ended`
and never raises.
"""

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Self

from millrace.sandbox.boundaries import Boundary, Missing, listed
from millrace.sandbox.messages import Limit, Verdict, receive, send

START_S = 60.0
"""Seconds in which a sandbox is made."""
SLACK_S = 30.0
"""Seconds in which the sandbox answers after the time of a program is over."""


class Uncontained(Exception):
    """This machine does not give every boundary; `missing` says which."""

    def __init__(self, missing: tuple[Missing, ...]) -> None:
        super().__init__(f"this machine does not give {listed(missing)} to the programs of answers")
        self.missing = missing


class SandboxFailed(Exception):
    """The sandbox itself failed, which says nothing about the program."""


@dataclass(frozen=True)
class Room:
    """What all processes of a program together may take."""

    memory_mb: int = 256
    """Memory with the files that they write, beyond what Python itself takes."""
    processes: int = 32
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """What they print."""


@dataclass(frozen=True)
class Program:
    """One run of a program."""

    code: str
    """What Python runs, with the arguments of `python -c`."""
    input: str = ""
    """What the program reads from its standard input."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files in its working folder, by name."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    verdict: Verdict
    output: str
    """What it printed on its standard output, up to the limit."""
    errors: str
    """The end of what it printed on its standard error."""
    report: str
    """What it wrote to descriptor 3."""
    seconds: float

    @property
    def well(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.verdict.status == 0


class ProgramSandbox:
    """A sandbox for one answer. Between two programs all processes are killed and all files are removed."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def __enter__(self) -> Self:
        self._server = _Server.running()
        answer = self._server.ask({"room": asdict(self._room)}, START_S)
        if answer["missing"]:
            self._server.tell({"end": True})
            raise Uncontained(tuple(Missing(Boundary(boundary), reason) for boundary, reason in answer["missing"]))
        return self

    def __exit__(self, *error: object) -> None:
        if self._server.alive:
            self._server.tell({"end": True})

    def run(self, program: Program, timeout_s: float) -> Ended:
        """Runs a program for at most `timeout_s` seconds. Raises SandboxFailed."""
        answer = self._server.ask({"program": asdict(program), "timeout_s": timeout_s}, timeout_s + SLACK_S)
        verdict = answer.pop("verdict")
        limit = verdict.pop("limit")
        return Ended(Verdict(**verdict, limit=None if limit is None else Limit(limit)), **answer)


def missing() -> tuple[Missing, ...]:
    """The boundaries that this process cannot give to a program. Raises SandboxFailed."""
    try:
        with ProgramSandbox(Room()):
            return ()
    except Uncontained as error:
        return error.missing


class _Server:
    """The process that makes sandboxes: one for this process, started when it is first needed."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "millrace.sandbox.program_server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.alive = True
        atexit.register(self._stop)

    @classmethod
    def running(cls) -> "_Server":
        """The server of this process."""
        server = _server(os.getpid())
        if not server.alive:
            _server.cache_clear()
            server = _server(os.getpid())
        return server

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a message. Raises SandboxFailed."""
        self.tell(message)
        try:
            answer = receive(self._replies, time.monotonic() + timeout_s)
        except (TimeoutError, ValueError) as error:
            self._stop()
            raise SandboxFailed(f"the sandbox did not answer: {type(error).__name__} {error}") from error
        if answer is None:
            self._stop()
            raise SandboxFailed("the sandbox ended instead of answering")
        return answer

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message that has no answer. Raises SandboxFailed."""
        try:
            send(self._requests, message)
        except OSError as error:
            self._stop()
            raise SandboxFailed(f"the sandbox ended: {error}") from error

    def _stop(self) -> None:
        """Kills the server. The kernel kills its sandboxes with it."""
        if self.alive:
            self.alive = False
            atexit.unregister(self._stop)
            self._process.kill()
            self._process.communicate()


@cache
def _server(process: int) -> _Server:
    """The server of this process: a fork has none."""
    return _Server()
