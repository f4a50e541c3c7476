"""A tree of files for a sandbox: what it sees is mounted read-only, a few devices, an empty /tmp and /dev/shm."""

import os
import shutil
from pathlib import Path

from millrace.sandbox import syscalls
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.view import View, is_within

STAGE = "/sys"
"""The tree is put together here, in the mount namespace of the sandbox. No sandbox sees what the folder held."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SCRATCH = ("/tmp", "/dev/shm")
"""The folders that can be written; they lie in memory."""
SCRATCH_FILES = 65536
"""Most files and folders in one of them."""
COPIED_BYTES = 48 << 20
"""Most that is copied because others may not read it; what is more is left out."""


def enter(view: View, scratch_mb: int, *, processes: bool, as_other_user: bool) -> list[Missing]:
    """Makes the tree the root of this process, which has a mount namespace of its own. Returns what is missing in it.

    `processes`: this process has a PID namespace, and gets the /proc of it. `as_other_user`: the code will run as a
    user who may not read what only its owner may; Python code among it is copied. Raises OSError if the kernel does
    not allow it; the old root is in place then.
    """
    os.umask(0o022)  # whoever started this process may keep new files from others, and the code runs as another user
    syscalls.mount(None, "/", syscalls.MS_SLAVE | syscalls.MS_REC)
    _mount_memory(STAGE, "mode=755,size=64m")
    try:
        for folder in SCRATCH:  # before what is shown: that may lie in /tmp
            os.makedirs(STAGE + folder, exist_ok=True)
            _mount_scratch(STAGE + folder, scratch_mb)
        os.mkdir(STAGE + STAGE)  # for a sandbox inside this one
        for path in view.shown:
            if as_other_user and path in view.code and _is_kept_from_others(path):
                _copy_code(path)
            else:
                _show(path)
        _hide(view)
        _make_devices()
        _make_links(view)
        missing = _make_proc(processes)
        os.makedirs(f"{STAGE}/var", exist_ok=True)
        os.symlink("/tmp", f"{STAGE}/var/tmp")
        syscalls.make_root(STAGE)
    except BaseException:
        syscalls.unmount(STAGE)
        raise
    syscalls.make_read_only("/")
    return missing


def others_can_read(path: str) -> bool:
    """Whether a user who neither owns the file or folder nor is in its group may read it."""
    wanted = 0o5 if os.path.isdir(path) else 0o4
    return os.stat(path).st_mode & wanted == wanted


def used_bytes() -> int:
    """Bytes that the folders which can be written take. Called inside."""
    sizes = [os.statvfs(folder) for folder in SCRATCH]
    return sum((size.f_blocks - size.f_bfree) * size.f_frsize for size in sizes)


def empty_scratch(view: View, scratch_mb: int) -> None:
    """Replaces the folders that can be written by empty ones. Called inside, where no process has a file there open
    that others are to see. What is shown in them (an interpreter in /tmp) is shown in the new ones too."""
    for folder in SCRATCH:
        inside = [path for path in view.shown if is_within(path, folder) and os.path.exists(path)]
        shown = [(path, os.path.isdir(path), syscalls.copy_of_tree(path)) for path in inside]
        links = [(name, real) for name, real in view.links if is_within(name, folder) and os.path.islink(name)]
        syscalls.unmount(folder)
        _mount_scratch(folder, scratch_mb)
        for path, is_folder, copy in shown:
            _make_place(path, is_folder=is_folder)
            syscalls.attach(copy, path)
            os.close(copy)
        for name, real in links:
            if not os.path.lexists(name):
                os.makedirs(os.path.dirname(name), exist_ok=True)
                os.symlink(real, name)


def _mount_scratch(folder: str, scratch_mb: int) -> None:
    _mount_memory(folder, f"mode=1777,size={scratch_mb}m,nr_inodes={SCRATCH_FILES}")


def _mount_memory(folder: str, options: str) -> None:
    syscalls.mount("tmpfs", folder, syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def _show(path: str) -> None:
    """Mounts the tree at `path` at the same place of the new tree, read-only."""
    devices = 0 if is_within(path, "/dev") else syscalls.NO_DEVICES
    target = STAGE + path
    _make_place(target, is_folder=os.path.isdir(path))
    copy = syscalls.copy_of_tree(path)
    try:
        syscalls.restrict(copy, syscalls.READ_ONLY | syscalls.NO_SETUID | devices)
        syscalls.attach(copy, target)
    finally:
        os.close(copy)


def _make_place(target: str, *, is_folder: bool) -> None:
    """An empty folder or file that a mount covers."""
    if is_folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()


def _is_kept_from_others(path: str) -> bool:
    """Whether only its owner may read a file, or a folder or code in it."""
    code = Path(path).glob("*.py") if os.path.isdir(path) else ()
    return not all(map(others_can_read, (path, *map(str, code))))


def _copy_code(path: str) -> None:
    """Copies a file, or what a folder holds of code and of files that others may read: the code becomes readable."""
    found = [Path(path)] if os.path.isfile(path) else sorted(Path(path).rglob("*"))
    code = [file for file in found if file.suffix == ".py" or file == Path(path)]
    rest = [file for file in found if file.suffix != ".py" and file.is_file() and others_can_read(str(file))]
    left = COPIED_BYTES
    for file in [*code, *rest]:
        left -= file.stat().st_size
        if left >= 0 and file.is_file():
            target = Path(f"{STAGE}{file}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            target.chmod(0o444)


def _hide(view: View) -> None:
    """Covers what is hidden inside a folder that is shown."""
    for path in view.hidden:
        target = STAGE + path
        if not any(is_within(path, outer) for outer in view.shown) or not os.path.exists(target):
            continue
        if os.path.isdir(target):
            syscalls.mount("tmpfs", target, syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY, "mode=000")
        else:
            nothing = syscalls.copy_of_tree("/dev/null")
            syscalls.attach(nothing, target)
            os.close(nothing)


def _make_devices() -> None:
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            _show(f"/dev/{name}")
    os.symlink("/proc/self/fd", f"{STAGE}/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{STAGE}/dev/{name}")


def _make_links(view: View) -> None:
    """Symbolic links outside the folders that are shown, as they are in the tree of the machine."""
    system = [(path, os.path.realpath(path)) for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")]
    made: list[str] = []
    for name, real in sorted({*view.links, *((name, real) for name, real in system if name != real)}):
        covered = any(is_within(name, outer) for outer in [*view.shown, *made])
        if not covered and not os.path.lexists(STAGE + name):
            os.makedirs(os.path.dirname(STAGE + name), exist_ok=True)
            os.symlink(real, STAGE + name)
            made.append(name)


def _make_proc(processes: bool) -> list[Missing]:
    os.makedirs(f"{STAGE}/proc", exist_ok=True)
    if not processes:
        return [Missing(Boundary.LIMITS, "needs a PID namespace")]
    try:
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", f"{STAGE}/proc", flags)
    except OSError as error:
        return [Missing(Boundary.LIMITS, str(error.strerror))]
    return []
