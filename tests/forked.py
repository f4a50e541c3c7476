"""Processes that are forked from a server which has imported torch and the services once, or vLLM.

Importing the services takes each process three to five seconds of a core, and vLLM's core and worker twelve. A test of
how a service is started starts it by its command instead.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from services.rollout.engines.vllm import environment
from services.rollout.engines.vllm.processes import ForkedProcess
from tests.run_servers import CORES, SERVICES, shared

SERVER: Any = forkserver
shared(SERVER._forkserver, SERVICES)


class Standard:
    """Standard output and error of a process, which become those of the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_over, (DupFd(1), DupFd(2))


def _take_over(*files: Any) -> Standard:
    for standard, file in enumerate(files, start=1):
        os.dup2(file.detach(), standard)
    return Standard()


class _Process(ForkServerProcess):
    def start(self) -> None:
        self._standard = Standard()
        super().start()


class _Context(ForkServerContext):
    Process = _Process


CONTEXT = _Context()
"""Starts processes as "spawn" does: nothing of the test's process is in them but its standard output and error."""


class Forked:
    """`python -m module arguments...` without the time for imports. It is used like subprocess.Popen."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        given: Path | None = None,
        errors: Path | None = None,
    ) -> None:
        """Standard output and error are appended to `log`, the error to `errors` if that is given; `given` is the
        standard input."""
        log.touch()
        files = (str(given or os.devnull), str(log), str(errors or log))
        whole = (module, tuple(arguments), dict(environment), files)
        self._process = CONTEXT.Process(target=_run, args=whole, name=module)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m module arguments...` to its end, with `environment` beside the test's. Raises
    subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        words, variables = list(map(str, arguments)), {**os.environ, **(environment or {})}
        process = Forked(module, words, variables, output, errors=errors)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess([module, *words], status, output.read_text(), errors.read_text())


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], files: tuple[str, str, str]) -> None:
    for standard, path in enumerate(files):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if standard else os.O_RDONLY)
        os.dup2(file, standard)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class CoreProcess(ForkedProcess):
    """The core of a vLLM engine that a test runs in its own process, forked as under a replica's launcher; the core's
    workers are forked from the same server."""

    _server = shared(forkserver.ForkServer(), CORES)
    _lock = threading.Lock()

    def start(self) -> None:
        self._standard = Standard()
        super().start()

    @classmethod
    def _Popen(cls, process: Any) -> Any:
        module: Any = forkserver
        with cls._lock:
            connect, module.connect_to_new_process = module.connect_to_new_process, cls._server.connect_to_new_process
            try:
                return popen_forkserver.Popen(process)
            finally:
                module.connect_to_new_process = connect


def fork_vllm() -> None:
    """From now on engines of this process fork their processes. Without it they spawn them, as without a launcher:
    tests/services/rollout/engines/test_vllm_processes.py has such a process, tests/e2e/test_elastic.py a replica."""

    def take_over_spawn() -> None:
        context: Any = SpawnContext
        context.Process = CoreProcess

    module: Any = environment
    module.take_over_spawn = take_over_spawn
