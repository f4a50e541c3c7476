"""One scoring process, as the pool uses it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from millrace.errors import InvalidJob, refused
from millrace.rewards.locate import Target
from millrace.sandbox.boundaries import Boundary, Missing, listed
from millrace.sandbox.launch import verdict
from millrace.sandbox.messages import Limit, Verdict
from millrace.sandbox.privileges import PROCESSES

LONGEST_LINE = 1 << 20
"""Bytes of an answer."""
EXIT_S = 10.0
"""A process that closed its pipe and has not ended after this time is killed."""
KILL_S = 5.0
"""A process that has not ended its sandbox after this time is killed itself."""
MARK = "MILLRACE_SCORING_PROCESS"
"""Environment variable that marks the descendants of a scoring process, for machines without PID namespaces."""
PASSED_ON = (
    "HF_HUB_OFFLINE",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "SSL_CERT_FILE",
    "TOKENIZERS_PARALLELISM",
    "TZ",
    "VIRTUAL_ENV",
)
"""Environment variables of the replica that a reward function sees. Others may hold secrets."""


class WorkerDied(Exception):
    """The process ended, or broke the protocol, instead of answering: `killed: SIGSEGV`, `exited with status 3`."""


@dataclass(frozen=True)
class Setup:
    """The first message to a process."""

    function: str
    """What is loaded; several names have commas between them."""
    options: Mapping[str, Any]
    memory_mb: int
    network: bool
    required: bool
    """Whether to refuse a machine that does not give every boundary."""
    field: ClassVar[str] = "reward.function"
    """The field of the job spec that names what is loaded."""
    worker: ClassVar[str] = "services.rollout.scoring.worker"
    """The module that the process runs."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of this process, besides those of the protocol, that the process gets."""
        return ()

    def message(self) -> dict[str, Any]:
        """The setup in JSON's types, with absolute paths: the sandbox has another working folder and home."""
        return {**asdict(self), "function": absolute(self.function)}


class UserProcess:
    """One process, with one call at a time. After WorkerDied, TimeoutError or a cancelled call it has to be killed."""

    def __init__(self, spawned: "_Spawned", control: socket.socket, memory_mb: int) -> None:
        self._spawned = spawned
        self._process = spawned.process
        self._control = control
        self._memory_mb = memory_mb
        self._asked = 0
        self._verdict: Verdict | None = None
        self._over = asyncio.Event()
        # Runs as soon as the process ends: later its pid may belong to another process.
        self._cleanup = asyncio.create_task(self._clean_up())
        self.missing: tuple[Missing, ...] | None = None
        """The boundaries that this machine does not give; None until the function is loaded."""
        self.greeting: Mapping[str, Any] = {}
        """What the process said when it had loaded the function."""

    @classmethod
    async def start(cls, setup: Setup, timeout_s: float) -> Self:
        """Starts a process and waits until the function is loaded.

        Raises InvalidJob if the function cannot be loaded or takes too long to, WorkerDied if the process ends.
        """
        ours, theirs = socket.socketpair()
        try:
            worker = cls(await _spawn(setup.worker, theirs.fileno(), *setup.descriptors), ours, setup.memory_mb)
        except BaseException:
            ours.close()
            raise
        finally:
            number = theirs.fileno()
            theirs.close()
        try:
            whole = {**setup.message(), "parent": os.getpid(), "control": number}
            greeting = await worker._exchange({**whole, "paths": more_paths(), "hidden": hidden_paths()}, timeout_s)
            worker.missing, worker.greeting = _accept(greeting, setup), greeting
        except TimeoutError as error:
            await worker.end()
            raise InvalidJob(
                f"{setup.field}: {setup.function} was not loaded within {timeout_s:g} s.",
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
        """Has everything in the sandbox killed, and the processes that guard it."""
        if self._over.is_set():
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        asyncio.get_running_loop().call_later(KILL_S, self._kill_group)

    async def end(self) -> None:
        """Kills the process and waits until none of its descendants is left."""
        self.kill()
        await asyncio.wait({self._cleanup})

    def _kill_group(self) -> None:
        if not self._over.is_set():
            _kill_group(self._process.pid)

    async def _clean_up(self) -> None:
        # Not Process.wait: it waits until the pipes are closed, and descendants of the process may hold them.
        await self._spawned.ended.wait()
        _kill_group(self._process.pid)
        self._verdict = verdict(self._control)
        self._control.close()
        self._over.set()
        assert self._process.stdin is not None
        if not (requests := self._process.stdin.transport).is_closing():
            requests.abort()  # close() would wait until the rest is read, and nobody reads it any more
        self._spawned.transport.close()
        if self.missing is None or any(each.boundary is Boundary.PROCESSES for each in self.missing):
            await asyncio.to_thread(_kill_marked, self._spawned.mark)

    async def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            await self.send(message)
            return await self.receive()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Writes one message to the process. Raises WorkerDied."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise WorkerDied(await self._how_it_ended()) from error

    async def receive(self) -> dict[str, Any]:
        """The next message of the process. Raises WorkerDied."""
        assert self._process.stdout is not None
        try:
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
                await self._over.wait()
        except TimeoutError:
            return "closed its pipe"
        status = self._process.returncode
        assert status is not None
        ended = self._verdict or (Verdict(status=status) if status >= 0 else Verdict(signal=-status))
        if ended.limit is Limit.MEMORY:
            return f"killed: memory limit {self._memory_mb} MB"
        if ended.limit is Limit.PROCESSES:
            return f"killed: more than {PROCESSES} processes"
        if ended.signal is None:
            return f"exited with status {ended.status}"
        return f"killed: {signal.Signals(ended.signal).name}, under a memory limit of {self._memory_mb} MB"


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


async def _spawn(module: str, *descriptors: int) -> _Spawned:
    loop, mark = asyncio.get_running_loop(), uuid.uuid4().hex
    transport, streams = await loop.subprocess_exec(
        _Streams,
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None,
        pass_fds=descriptors,
        start_new_session=True,
        env={**passed_environment(), MARK: mark},
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


def _accept(greeting: Mapping[str, Any], setup: Setup) -> tuple[Missing, ...]:
    """The boundaries that are missing. Raises InvalidJob if the function cannot be used."""
    if refusal := greeting.get("refused"):
        raise InvalidJob(refusal["what"], refusal["fix"])
    if failure := greeting.get("failure"):
        raise InvalidJob(f"{setup.field}: {setup.function} {failure} when it was imported.", "fix its module.")
    if lacking := greeting.get("uncontained"):
        raise refused(
            "reward.isolation",
            "required",
            f"this machine does not give {listed(_missing(lacking))}",
            "allow user namespaces, or run as root with CAP_SYS_ADMIN; `millrace doctor` shows the state.",
        )
    return _missing(greeting.get("missing", []))


def _missing(pairs: Sequence[Sequence[str]]) -> tuple[Missing, ...]:
    return tuple(Missing(Boundary(boundary), reason) for boundary, reason in pairs)


def absolute(function: str) -> str:
    """The name of a function with the absolute path of its file: the sandbox has another working folder and home."""
    target = Target(*function.rpartition(":")[::2])
    return f"{Path(target.place).expanduser().absolute()}:{target.function}" if target.is_file else function


def more_paths() -> list[str]:
    """What the operator lets every reward function read."""
    return [path for path in os.environ.get("MILLRACE_REWARD_PATHS", "").split(os.pathsep) if path]


def hidden_paths() -> list[str]:
    """Where the services keep their state and secrets."""
    named = os.environ.get("MILLRACE_HIDDEN_PATHS", "").split(os.pathsep)
    state = (os.environ.get("MILLRACE_STACK_STATE", ""), str(Path("~/.millrace").expanduser()))
    own = (os.environ.get("MILLRACE_TOKEN_FILE", ""), os.environ.get("MILLRACE_TLS_KEY", ""), *state)
    return [path for path in (*named, *own) if path]


def passed_environment() -> dict[str, str]:
    """A few named variables, and those that the operator names. Numeric libraries use one thread, as there are several
    processes."""
    named = os.environ.get("MILLRACE_REWARD_ENVIRONMENT", "").replace(",", " ").split()
    kept = {name: os.environ[name] for name in (*PASSED_ON, *named) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": "/tmp", **threads, **kept}
