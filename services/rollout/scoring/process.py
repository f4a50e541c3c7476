"""One scoring process, as the pool uses it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import psutil

from millrace.errors import InvalidJob

LONGEST_LINE = 1 << 20
"""Bytes of an answer."""
EXIT_S = 1.0
"""A process that closed its pipe and has not ended after this time is killed."""
MARK = "MILLRACE_SCORING_PROCESS"
"""Environment variable that marks the descendants of a scoring process, also those that left its process group."""


class WorkerDied(Exception):
    """The process ended, or broke the protocol, instead of answering: `killed: SIGSEGV`, `exited with status 3`."""


@dataclass(frozen=True)
class Setup:
    """The first message to a process."""

    function: str
    options: Mapping[str, Any]
    memory_mb: int
    network: bool


class ScoringProcess:
    """One process, with one call at a time. After WorkerDied, TimeoutError or a cancelled call it has to be killed."""

    def __init__(self, spawned: "_Spawned", lifeline: int, memory_mb: int) -> None:
        self._spawned = spawned
        self._process = spawned.process
        self._lifeline = lifeline
        self._memory_mb = memory_mb
        self._asked = 0
        # Runs as soon as the process ends: later its pid may belong to another process.
        self._cleanup = asyncio.create_task(self._clean_up())
        self.network: str | None = None
        """Why the process can reach the network although it should not; None otherwise."""

    @classmethod
    async def start(cls, setup: Setup, timeout_s: float) -> Self:
        """Starts a process and waits until the function is loaded.

        Raises InvalidJob where the function cannot be loaded or takes too long to, WorkerDied where the process ends.
        """
        theirs, ours = os.pipe()
        try:
            worker = cls(await _spawn(theirs), ours, setup.memory_mb)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        try:
            told = {**asdict(setup), "parent": os.getpid(), "lifeline": theirs}
            worker.network = _accept(await worker._exchange(told, timeout_s), setup)
        except TimeoutError as error:
            await worker.end()
            raise InvalidJob(
                f"reward.function: {setup.function} was not loaded within {timeout_s:g} s.",
                "keep slow work out of the module's top level, or start it when the function is first called.",
            ) from error
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one call. Raises TimeoutError, WorkerDied."""
        self._asked += 1
        reply = await self._exchange({"id": self._asked, **arguments}, timeout_s)
        if reply.get("id") != self._asked:
            raise WorkerDied("broke the protocol: its answer is not to the last call")
        return reply

    def kill(self) -> None:
        """Kills the process and its process group."""
        if not self._cleanup.done():
            _kill_group(self._process.pid)

    async def end(self) -> None:
        """Kills the process and waits until none of its descendants is left."""
        self.kill()
        await asyncio.wait({self._cleanup})

    async def _clean_up(self) -> None:
        # Not Process.wait: it waits until the pipes are closed, and descendants of the process may hold them.
        await self._spawned.ended.wait()
        _kill_group(self._process.pid)
        os.close(self._lifeline)
        assert self._process.stdin is not None
        if not (requests := self._process.stdin.transport).is_closing():
            requests.abort()  # close() would wait until the rest is read, and nobody reads it any more
        self._spawned.transport.close()
        await asyncio.to_thread(_kill_marked, self._spawned.mark)

    async def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise WorkerDied(await self._how_it_ended())
                reply = json.loads(line)
        except ConnectionError as error:
            raise WorkerDied(await self._how_it_ended()) from error
        except ValueError as error:
            raise WorkerDied(f"broke the protocol: {error}") from error
        return reply if isinstance(reply, dict) else {}

    async def _how_it_ended(self) -> str:
        try:
            async with asyncio.timeout(EXIT_S):
                await self._spawned.ended.wait()
        except TimeoutError:
            return "closed its pipe"
        status = self._process.returncode
        assert status is not None
        if status >= 0:
            return f"exited with status {status}"
        name = signal.Signals(-status).name
        return f"killed: {name}, under a memory limit of {self._memory_mb} MB"


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """Sets `ended` when the process ends, even while its descendants hold the pipes."""

    def __init__(self) -> None:
        super().__init__(LONGEST_LINE, asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


@dataclass(frozen=True)
class _Spawned:
    process: asyncio.subprocess.Process
    transport: asyncio.SubprocessTransport
    ended: asyncio.Event
    mark: str


async def _spawn(lifeline: int) -> _Spawned:
    loop, mark = asyncio.get_running_loop(), uuid.uuid4().hex
    transport, streams = await loop.subprocess_exec(
        _Streams,
        sys.executable,
        "-m",
        "services.rollout.scoring.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None,
        pass_fds=(lifeline,),
        start_new_session=True,
        env={**_environment(), MARK: mark},
    )
    return _Spawned(asyncio.subprocess.Process(transport, streams, loop), transport, streams.ended, mark)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """Kills descendants that left the process group: a process in a new session still has the environment variable."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(MARK) == mark:
                process.kill()


def _accept(greeting: Mapping[str, Any], setup: Setup) -> str | None:
    if refused := greeting.get("refused"):
        raise InvalidJob(refused["what"], refused["fix"])
    if failure := greeting.get("failure"):
        raise InvalidJob(f"reward.function: {setup.function} {failure} when it was imported.", "fix its module.")
    network: str | None = greeting.get("network")
    return network


def _environment() -> dict[str, str]:
    """The environment without Millrace's settings, which contain secrets. Numeric libraries use one thread, as there
    are several processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
