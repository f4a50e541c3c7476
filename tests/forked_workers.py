"""Workers of pytest-xdist, forked from a process that has collected the tests.

`python -m tests.forked_workers SOCKET ... -c CODE` runs CODE in a process that the server behind SOCKET forks, or as
`python ... -c CODE` would where there is no server any more.
"""

import os
import select
import signal
import socket
import sys
from types import ModuleType

LONGEST_CODE = 1 << 16
"""Bytes."""


def main(listener: int, alive: int) -> None:
    """The server: collects the tests for the arguments of pytest in `sys.argv`, and forks until the write end of the
    pipe `alive` is closed. It returns in a process that it has forked, at the end of the code that this one is for."""
    collect(sys.argv[1:])
    with socket.socket(fileno=listener) as server:
        code = serve(server, alive)
    sys.modules["__main__"] = ModuleType("__main__")  # nothing is imported from here where this process spawns others
    exec(code, sys.modules["__main__"].__dict__)


def collect(arguments: list[str]) -> None:
    """Imports the tests that pytest is asked for, and what they use. A file that cannot be imported is left to the
    workers, which report it."""
    from _pytest.config import _prepareconfig

    config = _prepareconfig(arguments, None)
    from xdist.remote import setup_config  # imported by pytest first, which rewrites its assertions

    setup_config(config, None)
    config.option.collectonly = True
    config.hook.pytest_cmdline_main(config=config)


def serve(listener: socket.socket, alive: int) -> str:
    """Forks a process for each client, which gets its number. Returns in these only: the code that the client sent,
    after its standard files have become those of the process. Processes that are left at the end are killed."""
    processes: list[int] = []
    while alive not in select.select([listener, alive], [], [])[0]:
        with listener.accept()[0] as client:
            code, files, _, _ = socket.recv_fds(client, LONGEST_CODE, 3)
            process = os.fork()
            if process == 0:
                os.close(alive)
                for standard, file in enumerate(files):
                    os.dup2(file, standard)
                    os.close(file)
                sys.stdin = open(0, closefd=False)  # noqa: SIM115
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                return code.decode()
            client.sendall(str(process).encode())
            for file in files:
                os.close(file)
            processes.append(process)
    for process in processes:
        if os.waitpid(process, os.WNOHANG)[0] == 0:
            os.kill(process, signal.SIGKILL)
    os._exit(0)


def ask(path: str, arguments: list[str]) -> None:
    """Lets the server run the code, and waits until that has ended."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            socket.send_fds(server, [arguments[-1].encode()], [0, 1, 2])
            process = int(server.recv(64))
        except (OSError, ValueError):
            os.execv(sys.executable, [sys.executable, *arguments])
    select.select([os.pidfd_open(process)], [], [])


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])
