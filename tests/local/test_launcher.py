"""The launcher of processes that are forked: what it makes of those that stand still."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STANDING_STILL = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from millrace.local.launcher import FORKING, Launcher
from millrace.local.restarts import Restarts
from millrace.wire.membership import LIFE_FILE, _show_life

def member(folder):
    _show_life()
    print("life", flush=True)
    if not (folder / "again").exists():
        (folder / "again").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
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


def test_a_member_that_stands_still_is_started_again(tmp_path: Path) -> None:
    """One that shows life lives on, longer than the other was waited for."""
    program = tmp_path / "program.py"
    program.write_text(STANDING_STILL)
    done = subprocess.run((sys.executable, str(program), str(tmp_path)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("life\n") == 2 and "they stood still for 1 s" in done.stdout + done.stderr
