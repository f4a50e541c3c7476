"""Which boundaries this machine gives: a sandbox is started, in a process of its own, and says what it misses."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

from millrace.errors import Unavailable
from millrace.sandbox import program
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view

TIMEOUT_S = 30.0
MEMORY_MB = 256


def missing(of: Literal["scorers", "programs"] = "scorers") -> list[Missing]:
    """The boundaries that a sandbox started by this process would not have, or one inside it for the programs of
    answers. Raises Unavailable if none starts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", "millrace.sandbox.probe", str(os.getpid()), str(number), of]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, pass_fds=(number,))
            found = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            what = f"a sandbox did not start: {error}."
            raise Unavailable(what, "run `python -m millrace.sandbox.probe` and look at its errors.") from error
    return [Missing(Boundary(boundary), reason) for boundary, reason in found]


def _main(parent: int, control: int, of: str) -> None:
    answer = os.dup(1)

    def tell(missing: Sequence[Missing]) -> None:
        if of == "programs":
            missing = program.missing()
        os.write(answer, json.dumps([[each.boundary, each.reason] for each in missing]).encode())

    confine(Wanted(view(), MEMORY_MB, network=False, kept=(answer,)), parent, control, tell)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
