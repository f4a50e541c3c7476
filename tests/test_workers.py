import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import BUSY, TOGETHER, WAITING, WAITING_LONGEST

SERVE = """
import socket
from tests.forked_workers import serve
exec(serve(socket.socket(fileno={}), {}))
"""


def test_the_files_that_are_told_apart_exist() -> None:
    named = {*BUSY, *WAITING, *WAITING_LONGEST, *TOGETHER, *TOGETHER.values()}
    assert [path for path in named if not (Path(__file__).parent / path).exists()] == []
    assert all(path.startswith(WAITING) for path in WAITING_LONGEST)


def test_a_worker_is_forked_while_its_server_lives(tmp_path: Path) -> None:
    """It has its client's standard files. Without the server its code runs in the client."""
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        code = SERVE.format(listener.fileno(), alive)
        server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[listener.fileno(), alive])
    os.close(alive)
    assert told_parent(tmp_path / "socket") == server.pid
    os.close(ours)
    assert server.wait() == 0
    assert told_parent(tmp_path / "socket") == os.getpid()


def told_parent(path: Path) -> int:
    """The parent process of one that the server behind `path` is asked for."""
    code = "import os; print(input(), os.getppid())"
    command = [sys.executable, "-m", "tests.forked_workers", str(path), "-u", "-c", code]
    told = subprocess.run(command, input="parent\n", capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "parent"
    return int(told[1])
