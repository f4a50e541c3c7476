"""`--help` of each service and of `export` answers at once: it imports what its options need, and not what it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.errors import InvalidState
from services.trainer.checkpoints import FILE
from services.trainer.checkpoints.export import check_checkpoint

HEAVY = ("torch", "transformers", "vllm", "fastapi", "redis", "pyarrow")


@pytest.mark.parametrize(
    "service",
    [
        "coordinator",
        "trainer",
        "trainer.launch",
        "trainer.checkpoints.export",
        "rollout",
        "rollout.launch",
        "environments",
    ],
)
def test_help_imports_nothing_heavy(service: str) -> None:
    program = f"""
import runpy, sys
sys.argv = ["{service}", "--help"]
try:
    runpy.run_module("services.{service}", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout.lower() and done.stdout.splitlines()[-1] == "LOADED []"


def test_a_folder_that_is_no_checkpoint_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from services.trainer.checkpoints import export
try:
    export.export({tmp_path!r}.joinpath("saved"), {tmp_path!r}.joinpath("out"))
except BaseException as ended:
    print("ENDED", ended.exit_code, [name for name in {HEAVY!r} if name in sys.modules])
"""
    program = "from pathlib import PosixPath\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "ENDED 1 []", done.stderr


def test_an_output_folder_is_answered_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / FILE).touch()
    (tmp_path / "checkpoints" / "step-11").mkdir()  # was not finished
    for given in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(InvalidState) as found:
            check_checkpoint(given)
        assert found.value.fix == f"give one in it; the newest is {tmp_path / 'checkpoints' / 'step-10'}."
    check_checkpoint(tmp_path / "checkpoints" / "step-9")
