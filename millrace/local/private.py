"""Folders and files of a service that only its user may read: they hold jobs, data and samples."""

import contextlib
import os
from pathlib import Path

OTHERS = 0o077
"""The rights of everybody else."""


def private_folder(path: Path) -> None:
    """Makes a folder of Millrace's own, or takes others' rights away from the one that is there already."""
    new_private_folder(path)
    with contextlib.suppress(PermissionError):
        if (mode := path.stat().st_mode) & OTHERS:
            path.chmod(mode & ~OTHERS)


def new_private_folder(path: Path) -> None:
    """Makes a folder that a user names. One that is there already stays as it is: other things may be in it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """For `open`'s `opener`: a new file is this user's alone."""
    return os.open(path, flags, 0o600)
