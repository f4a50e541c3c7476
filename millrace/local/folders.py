"""Folders of a service: those that only its user may read, since they hold jobs, data and samples, and those with a
path that is short enough for Unix sockets.

Linux takes 107 bytes for the path of a socket. TMPDIR, where Python and the engines put theirs, is often longer than
that on a cluster: Slurm names a folder after user, job and step.
"""

import contextlib
import hashlib
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import Unavailable

OTHERS = 0o077
"""The rights of everybody else."""
LONGEST = 107
"""Bytes of a socket's path."""
LONGEST_NAME = 59
"""Bytes that are put behind `short_root()`, at most: a private folder, and vLLM's names of 36 characters in it."""
ROOTS = ("/tmp", "/var/tmp", "/dev/shm")


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


def short_root() -> Path:
    """The folder in which private folders for sockets are made. It follows TMPDIR only if no other one can be written
    to: a service that is started again with another TMPDIR has to find the sockets of its earlier life. Raises
    Unavailable if there is none."""
    for root in (*ROOTS, tempfile.gettempdir()):
        if len(os.fsencode(root)) + LONGEST_NAME <= LONGEST and os.access(root, os.W_OK | os.X_OK):
            return Path(root)
    what = f"TMPDIR: {tempfile.gettempdir()}: is too long for a socket, and {', '.join(ROOTS)} cannot be written to."
    raise Unavailable(what, f"set TMPDIR to a folder whose path has at most {LONGEST - LONGEST_NAME} bytes.")


def socket_in(folder: Path, name: str) -> Path:
    """Path of a socket in the folder, or in a folder of its own in `short_root()` if that path is too long. The same
    folder has the same socket each time. Raises Unavailable as `short_root`."""
    path = folder.absolute() / name
    if len(os.fsencode(path)) <= LONGEST:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return short_root() / f"millrace-{os.getuid()}-{digest}" / name


def short_sockets() -> Path:
    """Puts the sockets of multiprocessing (the fork server's too) and of vLLM into a short and private folder, also for
    all processes that this one starts. Returns the folder. It is removed when this process exits."""
    with short_temporary_folder():
        folder = multiprocessing.util.get_temp_dir()  # made once, and passed to the processes that are started
    os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
    return Path(folder)


def remove_sockets() -> None:
    """Removes the folder of `short_sockets`, for a process that ends without Python's exit handlers."""
    if multiprocessing.parent_process() is None:  # otherwise it is the parent's
        with contextlib.suppress(Unavailable):  # there was none to put it in
            shutil.rmtree(short_sockets(), ignore_errors=True)


@contextlib.contextmanager
def short_temporary_folder() -> Iterator[None]:
    """Inside, `tempfile` of this process makes its files in `short_root()`."""
    before, tempfile.tempdir = tempfile.tempdir, str(short_root())
    try:
        yield
    finally:
        tempfile.tempdir = before
