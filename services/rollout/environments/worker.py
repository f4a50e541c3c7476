"""One process of an environment: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: the fields of `EnvironmentSetup`, {parent, control}. First line out: {"ready": true, "missing": ...,
"tools": [...]}, otherwise as a scoring process says it (`services/rollout/scoring/worker.py`). From then on requests,
{id} and a request of `services.rollout.environments.host`; the answer is {id} and that of the host, {failure} or
{out_of_memory}. Requests of several episodes run side by side, and are answered as they end. One that blocks the
process for too long is answered {blocked}, and the replica kills the process. It ends when its input does. The class is
loaded and runs inside a sandbox (`millrace.sandbox`).
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from millrace.environments.registry import FIELD, load
from millrace.environments.tools import BadTool
from millrace.errors import InvalidJob, refused
from millrace.rewards.outcome import BadOutcome
from services.rollout.environments.host import BadReturn, Host, TooSlow
from services.rollout.user_process import sandboxed

LONGEST_REQUEST = 64 << 20
"""Bytes of a request: a row, or a turn of the policy."""
LOOK_EVERY_S = 0.25


def main() -> None:
    pipes = sandboxed.take_pipes()
    setup = json.loads(pipes[0].readline())
    sandboxed.confined(setup, pipes, [*sandboxed.code_of(setup["function"]), *map(Path, setup["code"])], _serve)


def _serve(setup: Mapping[str, Any], requests: IO[bytes], replies: IO[bytes], lacking: sandboxed.Lacking) -> None:
    try:
        host = _host(setup)
    except InvalidJob as error:
        sandboxed.reply(replies, {"refused": {"what": error.what, "fix": error.fix}})
        return
    except BaseException as error:
        # The user's module runs here, and may raise anything.
        sandboxed.reply(replies, {"failure": sandboxed.describe_error(error)})
        return
    sandboxed.reply(replies, {"ready": True, "missing": lacking, "tools": host.specs})
    asyncio.run(Requests(host, setup["call_s"], replies).answer_all(requests))


class Requests:
    """Answers requests side by side."""

    def __init__(self, host: Host, call_s: float, replies: IO[bytes]) -> None:
        self._host, self._call_s, self._replies = host, call_s, replies
        self._running: dict[asyncio.Task[None], int] = {}
        """Ids of the requests that are not answered."""
        self._one_at_a_time = threading.Lock()

    async def answer_all(self, requests: IO[bytes]) -> None:
        """Answers until the input ends. What still runs then is cancelled."""
        reader, loop = asyncio.StreamReader(LONGEST_REQUEST), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        while line := await reader.readline():
            request = json.loads(line)
            task = asyncio.create_task(self._answer(request))
            self._running[task] = request["id"]
            task.add_done_callback(self._running.pop)

    async def _answer(self, request: Mapping[str, Any]) -> None:
        self._reply(await _answer(self._host, request))

    def _reply(self, message: Mapping[str, Any]) -> None:
        with self._one_at_a_time, contextlib.suppress(BrokenPipeError):
            sandboxed.reply(self._replies, message)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tells which request runs plain code for longer than a call may take. Others in the process wait for it, so
        that their time says nothing of them. Runs in a thread of its own."""
        went_on, never = threading.Event(), threading.Event()
        while not loop.is_closed():
            went_on.clear()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(went_on.set)
            blocking = self._blocking(loop, went_on)
            if blocking is not None and (blocked := self._running.get(blocking)) is not None:
                self._reply({"id": blocked, "blocked": True})
            went_on.wait()
            never.wait(LOOK_EVERY_S)

    def _blocking(self, loop: asyncio.AbstractEventLoop, went_on: threading.Event) -> "asyncio.Task[None] | None":
        """The task that runs plain code for longer than a call may take; None as soon as the loop goes on. Plain code
        of several tasks may run one after the other."""
        current, since_s = asyncio.current_task(loop), time.monotonic()
        while not went_on.wait(min(LOOK_EVERY_S, self._call_s)):
            before, current = current, asyncio.current_task(loop)
            if current is not before:
                since_s = time.monotonic()
            elif current is not None and time.monotonic() - since_s >= self._call_s:
                return current
        return None


def _host(setup: Mapping[str, Any]) -> Host:
    try:
        return Host(load(setup["function"], setup["options"]), setup["options"], setup["call_s"])
    except BadTool as error:
        raise refused(
            FIELD, setup["function"], str(error), "annotate every parameter of a tool with its type."
        ) from error


async def _answer(host: Host, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"id": request["id"], **await host.answer(request)}
    except (BadReturn, BadOutcome, TooSlow) as error:
        failure = str(error)
    except MemoryError:
        return {"id": request["id"], "out_of_memory": True}
    except BaseException as error:
        # The user's class runs here, and may raise anything, SystemExit too. A call that was given up is cancelled.
        failure = sandboxed.describe_error(error)
    # The processes of other episodes cannot be distinguished from those that this one left.
    return {"id": request["id"], "failure": failure, "spoiled": host.episodes <= 1 and sandboxed.left_processes()}


if __name__ == "__main__":
    main()
