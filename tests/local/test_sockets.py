"""Sockets lie in a short folder, whatever TMPDIR is."""

import multiprocessing.util
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from millrace.errors import Unavailable
from millrace.local import folders

PROGRAM = """
import os, sys
from pathlib import Path
from millrace.local.launcher import FORKING, fork_from

if __name__ == "__main__":
    fork_from("json")
    child = FORKING.Process(target=print, args=("forked",), kwargs={"flush": True})
    child.start()
    child.join()
    print(os.environ["VLLM_RPC_BASE_PATH"])
    sys.exit(child.exitcode)
"""


def test_a_process_is_forked_with_a_tmpdir_as_slurm_makes_them(tmp_path: Path) -> None:
    folder = tmp_path / ("scratch_of_a_user_" * 6)
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.getcwd()}
    environment.pop("VLLM_RPC_BASE_PATH", None)
    ran = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    forked, where = ran.stdout.splitlines()
    assert forked == "forked"
    assert len(f"{where}/{'u' * 36}") <= folders.LONGEST
    assert not Path(where).exists()
    assert not list(folder.iterdir())


def test_the_folder_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    folder = folders.short_sockets()
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder) == multiprocessing.util.get_temp_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_only_tempfile_of_the_block_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with folders.short_temporary_folder(), tempfile.NamedTemporaryFile() as file:
        assert Path(file.name).parent == folders.short_root()
    assert tempfile.gettempdir() == str(tmp_path)


def test_no_folder_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "ROOTS", (str(tmp_path / "none"),))
    long = tmp_path / ("a" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(Unavailable, match=r"^TMPDIR: .* is too long for a socket.*at most 48 bytes"):
        folders.short_root()
    monkeypatch.setattr(tempfile, "tempdir", "/run")
    assert folders.short_root() == Path("/run")
