"""The process of a sandbox in which the command of an agent runs, once.

First line in: the fields of `AgentSetup`, {paths, hidden, parent, control}. It makes a listening socket on the loopback
of its network and hands it to the replica over the channel, so that requests from inside are answered outside although
no network leads there. Then it prints {"ready": true, "missing": ...}. The request {id, command, env} runs the command;
the answer is {id, status, tail}, or {id, failure}.
"""

import json
import os
import select
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from services.rollout.user_process.sandboxed import Lacking, confined, reply, take_pipes

LONGEST_TAIL = 16 << 10
"""Bytes of the command's output that are kept, the last ones."""
LAST_OUTPUT = 1 << 20
"""Bytes that are read after the command has ended."""


def main() -> None:
    pipes = take_pipes()
    setup = json.loads(pipes[0].readline())
    confined(setup, pipes, map(Path, setup["code"]), _serve, setup["channel"], loopback=True)


def _serve(setup: Mapping[str, Any], requests: Iterable[bytes], replies: IO[bytes], lacking: Lacking) -> None:
    with socket.socket(fileno=setup["channel"]) as channel, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        socket.send_fds(channel, [b"listening"], [listener.fileno()])
    reply(replies, {"ready": True, "missing": lacking})
    for line in requests:
        request = json.loads(line)
        reply(replies, {"id": request["id"], **_run(request["command"], request["env"])})


def _run(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return {"failure": str(error.strerror)}
    assert process.stdout is not None
    tail = _tail(process.stdout.fileno(), os.pidfd_open(process.pid))
    return {"status": process.wait(), "tail": tail.decode(errors="replace")}


def _tail(output: int, ended: int) -> bytes:
    """The end of what a process prints until it has ended. What it has started may hold the pipe for longer."""
    poll = select.poll()
    for descriptor in (output, ended):
        poll.register(descriptor, select.POLLIN)
    tail, left = b"", LAST_OUTPUT
    while left > 0:
        ready = {descriptor for descriptor, _ in poll.poll()}
        part = os.read(output, 1 << 16) if output in ready else b""
        tail = (tail + part)[-LONGEST_TAIL:]
        if ended in ready:
            if not part:
                break
            left -= len(part)
        elif not part:
            poll.unregister(output)
    return tail


if __name__ == "__main__":
    main()
