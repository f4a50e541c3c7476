"""Processes that are forked from a server which has imported torch and the services once.

Importing them takes each process three to five seconds of a core. A test of how a service is started starts it by its
command instead.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes as "spawn" does: nothing of the test's process is in them."""
CONTEXT.set_forkserver_preload(["tests.forked_imports"])


class Forked:
    """`python -m module arguments...` without the time for imports. It is used like subprocess.Popen."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Standard output and error are appended to `log`."""
        log.touch()
        whole = (module, tuple(arguments), dict(environment), str(log))
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


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
