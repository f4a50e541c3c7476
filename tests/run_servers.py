"""Servers from which all workers of a run fork: the workers themselves, with the tests collected, and processes of
services and of vLLM's engines.

Each worker would import and collect everything for itself otherwise, for twenty seconds of a core, and each would have
servers of its own.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

SERVICES, CORES = "services", "cores"
PRELOADED = {
    SERVICES: ["tests.uncollected", "tests.forked_imports", "tests.frozen"],
    CORES: ["tests.uncollected", "services.rollout.engines.vllm.preload", "tests.frozen"],  # vLLM changes torch
}
"""The servers that multiprocessing uses, and the modules that each imports first."""
WORKERS = "workers"
FOLDER = "MILLRACE_TEST_SERVERS"
"""Environment variable: the folder with the sockets of the servers, if there are any."""


class RunServers:
    """The servers of a run. They end with the process that has started them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: those of pytest."""
        self._folder = Path(tempfile.mkdtemp(prefix="millrace-tests-"))
        os.environ[FOLDER] = str(self._folder)
        self._alive_r, self._alive_w = os.pipe()
        workers = "from tests.forked_workers import main; main"
        services = "from tests.run_servers import fork_when_asked; fork_when_asked"
        self._processes = [
            self._start(WORKERS, workers, *arguments),
            *(self._start(name, services, *modules) for name, modules in PRELOADED.items()),
        ]
        self.python = f"{sys.executable} -m tests.forked_workers {self._folder}/{WORKERS}"
        """A command that takes the arguments of an interpreter."""

    def _start(self, name: str, function: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """A process with `arguments` that calls a function with a listening socket, and with a pipe that is closed
        when it has to end."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self._folder}/{name}")
            listener.listen(64)
            files = [listener.fileno(), self._alive_r]
            command = [sys.executable, "-c", "{}({}, {})".format(function, *files), *arguments]
            with self._log(name).open("wb") as log:
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=files)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def errors(self) -> Iterator[str]:
        """What the servers have written, and processes whose output no test takes: workers of vLLM's engines."""
        for name in PRELOADED:
            yield from self._log(name).read_text(errors="replace").splitlines()

    def end(self) -> None:
        os.close(self._alive_w)
        os.close(self._alive_r)
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._folder)
        os.environ.pop(FOLDER)


def fork_when_asked(listener: int, alive: int) -> None:
    """A server of multiprocessing, which imports nothing before it is asked for a process."""
    if alive not in select.select([listener, alive], [], [])[0]:
        main: Any = forkserver.main
        main(listener, alive, sys.argv[1:])


def shared(server: forkserver.ForkServer, name: str) -> forkserver.ForkServer:
    """`server`, which stands for the run's if there is one. A process that a server has forked stays with that one:
    workers of vLLM come from the server of their core."""
    server.set_forkserver_preload(PRELOADED[name])
    fields: Any = server
    if (folder := os.environ.get(FOLDER)) and fields._forkserver_address is None:
        fields._forkserver_address = f"{folder}/{name}"
        fields._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the run's server ends with the run
        fields.ensure_running = resource_tracker.ensure_running
    return server
