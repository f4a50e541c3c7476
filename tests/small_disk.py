"""A small file system, to be filled. Only root can mount one: for other users the test is skipped."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own at `folder`, in memory."""
    folder.mkdir(exist_ok=True)
    size = f"size={megabytes}m"
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def filled(folder: Path) -> Path:
    """Fills the disk of `folder`; the file that does."""
    path = folder / "filled"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path
