import secrets
import signal
import subprocess
import sys

import pytest

from tests.local.programs import STUBBORN, alive, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and subreapers are Linux's")

PARENT = """
import signal, sys, time
from millrace.local import child_processes
child_processes.adopt_orphans()
child = child_processes.start((sys.executable, "-c", *sys.argv[2:]), {}, None, signal.Signals[sys.argv[1]])
print("up", flush=True)
sys.stdin.readline()
left = child_processes.sweep(grace_s=0.3)
print("left", left, flush=True)
"""


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


def parent(death: signal.Signals, *child: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PARENT, death.name, *child]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "up" in process.stdout.readline()
    return process


def test_a_child_dies_with_a_parent_that_is_killed(mark: str) -> None:
    process = parent(signal.SIGKILL, STUBBORN, mark)
    eventually(lambda: len(alive(mark)) == 2)  # the parent's command line has the mark too
    process.kill()
    process.wait()
    eventually(lambda: not alive(mark))


def test_sweep_ends_stubborn_grandchildren_whose_parent_is_gone(mark: str) -> None:
    process = parent(signal.SIGTERM, STUBBORN, mark, STUBBORN)
    eventually(lambda: len(alive(mark)) == 3)
    child = next(p for p in alive(mark) if p.ppid() == process.pid)
    child.kill()
    eventually(lambda: len(alive(mark)) == 2)
    told, _ = process.communicate("go\n", timeout=20)
    assert "left []" in told
    eventually(lambda: not alive(mark))


WATCHING = """
import sys
from millrace.local.child_processes import watchdog
raise SystemExit(watchdog((sys.executable, "-c", "import time; print('importing', flush=True); time.sleep(600)")))
"""


def test_a_supervisor_that_has_not_begun_is_stopped_in_order() -> None:
    """It has no handler of signals while it imports."""
    argv = [sys.executable, "-c", WATCHING]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert "importing" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert (told, process.returncode) == ("", 0)
