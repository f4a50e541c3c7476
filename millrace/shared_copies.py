"""Model folders copied into the shared memory of this host, once for all ranks of a trainer. Torch-free.

A copy is named by the files that it holds: their paths, sizes and times of change. Its users hold a shared lock on the
file beside it, which the kernel takes back when a process ends, however it ends. The last user removes the copy; what a
killed process leaves behind is removed by the next that makes a copy, and by the local stack when it ends.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from millrace.errors import InvalidJob, Unavailable, refused

if TYPE_CHECKING:
    from millrace.spec import JobSpec  # the local stack, which only collects, does without its imports

log = structlog.get_logger(__name__)

FIELD = "model.use_shm"
SHARED_MEMORY = Path("/dev/shm")
"""The file system in memory that Linux has for this."""
KEPT_FREE = 1 << 30
"""Bytes that a copy leaves free there: other processes, NCCL among them, need some."""
WAIT_S = 1800.0
"""Longest time that a process waits for another one that makes the copy."""
POLL_S = 0.05


@dataclass(frozen=True)
class SharedCopy:
    """A copy that this process uses."""

    path: Path
    _lock: int

    def release(self) -> None:
        """Ends the use. The copy is removed if no other process uses it."""
        _remove_unused(self.path, self._lock)
        os.close(self._lock)


def in_shared_memory(spec: "JobSpec") -> "tuple[JobSpec, list[SharedCopy]]":
    """The spec with the paths of copies in place of its model folders, if it asks for that, and the copies, which
    the caller releases. Raises InvalidJob if a folder cannot be read, if there is no room, or if this user
    cannot have shared memory for itself; Unavailable if another process takes too long."""
    if not spec.model.use_shm:
        return spec, []
    critic, copies = spec.algorithm.critic, dict[str, SharedCopy]()
    folders = {"model.path": spec.model.path, "model.weights": spec.model.weights}
    folders["algorithm.critic.path"] = None if critic is None else critic.path
    with ExitStack() as acquired:
        for field, folder in folders.items():
            if folder is not None:
                copies[field] = acquire(Path(folder), field)
                acquired.callback(copies[field].release)
        acquired.pop_all()
    path, weights, critics = (str(copies[field].path) if field in copies else None for field in folders)
    changed: dict[str, Any] = {"model": spec.model.model_copy(update={"path": path, "weights": weights})}
    if critic is not None:
        critic = critic.model_copy(update={"path": critics})
        changed["algorithm"] = spec.algorithm.model_copy(update={"critic": critic})
    return spec.model_copy(update=changed), list(copies.values())


def acquire(folder: Path, field: str = "model.path") -> SharedCopy:
    """The copy of a model folder, made if there is none. `field` names the folder in the spec. Raises as
    `in_shared_memory`."""
    files = _files(folder, field)
    path = _home() / f"{folder.name}-{_identity(files)}"
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        _use(path, lock, files)
    except BaseException:
        os.close(lock)
        raise
    collect()
    return SharedCopy(path, lock)


def collect() -> None:
    """Removes the copies of this user that no process uses."""
    home = _home_path()
    if not _is_private(home):
        return
    for found in home.glob("*.lock"):
        lock = os.open(found, os.O_RDWR | os.O_CLOEXEC)
        try:
            _remove_unused(found.with_suffix(""), lock)
        finally:
            os.close(lock)


def _files(folder: Path, field: str) -> list[Path]:
    try:
        return [file for file in sorted(folder.iterdir()) if file.is_file()]
    except OSError as error:
        reason = f"the trainer's host cannot read this folder: {error.strerror or error}"
        raise refused(field, str(folder), reason, "give a folder that every host of the trainer can read.") from error


def _home() -> Path:
    """The folder of this user's copies. Every user may write to shared memory, so a folder that another one could have
    filled is refused. Raises InvalidJob."""
    home = _home_path()
    try:
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
    except OSError as error:
        raise _not_writable(home, error) from error
    if not _is_private(home):
        reason = f"{home} is not a folder of this user with mode 0700, so that another user may have put files there"
        raise refused(FIELD, True, reason, "remove it, or set model.use_shm to false.")
    return home


def _home_path() -> Path:
    return SHARED_MEMORY / f"millrace-models-{os.getuid()}"


def _is_private(home: Path) -> bool:
    """Whether it is a folder, no link to one, that this user alone may open."""
    try:
        found = home.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700


def _not_writable(path: Path, error: OSError) -> InvalidJob:
    fix = f"let this user write to {SHARED_MEMORY}, or set it to false."
    return refused(FIELD, True, f"{path} cannot be made: {error.strerror or error}", fix)


def _use(path: Path, lock: int, files: list[Path]) -> None:
    """Returns with the shared lock held and the copy complete."""
    deadline = time.monotonic() + WAIT_S
    while True:
        if _try_lock(lock, fcntl.LOCK_SH) and path.is_dir():
            return
        if _try_lock(lock, fcntl.LOCK_EX) and not path.is_dir():
            _copy(files, path)
            continue  # the exchange of locks is not atomic: the copy may be gone again
        fcntl.flock(lock, fcntl.LOCK_UN)
        if time.monotonic() > deadline:
            what = f"{FIELD}: {path} is still being made by another process after {WAIT_S:.0f} s."
            raise Unavailable(what, "see what that process does, or set model.use_shm to false.")
        time.sleep(POLL_S)


def _copy(files: list[Path], path: Path) -> None:
    """Makes the copy; its lock is held. What killed processes left there is removed before the free space is read."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    collect()
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(SHARED_MEMORY).free
    if needed + KEPT_FREE > free:
        reason = (
            f"{SHARED_MEMORY} of this host has {free / 1e9:.1f} GB free, and the model of {needed / 1e9:.1f} GB has to "
            f"leave {KEPT_FREE / 1e9:.1f} GB of it"
        )
        fix = "free or enlarge it (docker run --shm-size, compose shm_size), or set it to false."
        raise refused(FIELD, True, reason, fix)
    began = time.monotonic()
    try:
        partial.mkdir()
        for file in files:
            shutil.copyfile(file, partial / file.name)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = f"the model cannot be copied to {path}: {error.strerror or error}"
        raise refused(FIELD, True, reason, "free memory there, or set it to false.") from error
    partial.rename(path)
    log.info("in shared memory", path=str(path), bytes=needed, seconds=round(time.monotonic() - began, 1))


def _remove_unused(path: Path, lock: int) -> None:
    """Removes the copy if no other process holds its lock. The caller's own lock ends."""
    if _try_lock(lock, fcntl.LOCK_EX):
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(path.with_name(f"{path.name}.partial"), ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_UN)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity(files: list[Path]) -> str:
    """Names the files as they are now: a folder that changed gets a copy of its own."""
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
