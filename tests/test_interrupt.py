"""Ctrl-C while a command imports ends it with the status of an interrupted program, and it prints nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "validate": ("-m", "millrace", "validate", "job.yaml"),
    "bench": ("-m", "millrace", "bench", "plan"),
    "demo": ("-m", "millrace.demo"),
    "export": ("-m", "services.trainer.checkpoints.export", "CHECKPOINT", "folder"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_imports_prints_no_traceback(command: str, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "trainer.json").write_text("{}")
    last = "torch.version" if command == "export" else "typer"
    """The import after which Ctrl-C comes."""
    words = [word.replace("CHECKPOINT", str(tmp_path / "step-1")) for word in COMMANDS[command]]
    argv = [sys.executable, "-X", "importtime", *words]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, preexec_fn=_take_ctrl_c
    ) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if line.split("|")[-1].strip() == last)
        process.send_signal(signal.SIGINT)
        told += process.stderr.read()
    assert process.returncode == 130
    assert all(line.startswith("import time:") for line in told.splitlines()), told


def _take_ctrl_c() -> None:
    """The tests may run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_that_is_ignored_stays_ignored(ignored: bool) -> None:
    """As for a command in the background of a shell."""
    program = (
        "import os, signal\n"
        "from millrace.interrupt import importing\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'})\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "with importing():\n"
        "    assert (signal.getsignal(signal.SIGINT) is before) is (before is signal.SIG_IGN)\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "with importing():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == ((0, "goes on\n", "") if ignored else (130, "", ""))
