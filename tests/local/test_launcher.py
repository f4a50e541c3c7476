"""The launcher of processes that are forked: what it makes of those that stand still, fail, or lose their parent."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from millrace.local.launcher import FORKING, Launcher
from millrace.local.lives import Restarts
from millrace.wire.membership import LIFE_FILE, _show_life

def member(folder):
    _show_life()
    print("life", flush=True)
    if not (folder / "again").exists():
        {first}
    for _ in range(20):
        time.sleep(0.1)
        _show_life()
    (folder / "drained").touch()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ["MILLRACE_DRAINED_FILE"] = str(folder / "drained")
    made = lambda: [FORKING.Process(target=member, args=(folder,), name="the member")]
    raise SystemExit(Launcher(made, Restarts(limit=2, first_wait_s=0.1), silent_s=1.0).run())
"""


def launched(folder: Path, first: str) -> tuple[int, str]:
    """Status and output of a launcher whose member does `first` in each life before `again` exists in the folder, and
    is drained in a life after that."""
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("{first}", first))
    done = subprocess.run((sys.executable, str(program), str(folder)), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_member_that_stands_still_is_started_again(tmp_path: Path) -> None:
    """One that shows life lives on, longer than the other was waited for."""
    status, told = launched(tmp_path, '(folder / "again").touch(); os.kill(os.getpid(), signal.SIGSTOP)')
    assert status == 0, told
    assert told.count("life\n") == 2 and "they stood still for 1 s" in told


def test_the_process_that_forks_is_started_again_too(tmp_path: Path) -> None:
    status, told = launched(
        tmp_path, '(folder / "again").touch(); os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)'
    )
    assert status == 0, told
    assert told.count("life\n") == 2 and "the processes are started again" in told


def test_a_member_that_keeps_failing_ends_the_launcher(tmp_path: Path) -> None:
    status, told = launched(tmp_path, "sys.exit(3)")
    assert status == 1 and "ended too often" in told and "ended with status 3" in told
    assert told.count("life\n") == 3, "it is started again twice"
