"""The user, the rights and the limits of the process that runs a user's code."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from millrace.sandbox import syscalls
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.tree import others_can_read
from millrace.sandbox.view import View

FIRST_USER = 2_000_000_000
"""No system gives ids from here on to people, services or containers."""
FEWEST_USERS = 60_000
"""A container with fewer users than this has none to spare."""
PROCESSES = 100
"""Most processes and threads of one sandbox."""
OPEN_FILES = 1024
MAPPED_LIBRARIES = 4 << 30
"""Bytes of address space for mapped files. Libraries count there, although they take little memory."""
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21


def may_make_namespaces() -> bool:
    """Whether this process may make namespaces without a user namespace of its own."""
    return _has(CAP_SYS_ADMIN)


def may_change_user() -> bool:
    """Whether this process may become another user."""
    return _has(CAP_SETUID) and _has(CAP_SETGID)


def _has(capability: int) -> bool:
    return bool(int(_status()["CapEff"], 16) >> capability & 1)


def own_user(view: View, number: int, *, own_tree: bool) -> int | Missing:
    """The id of a user, and of its group, that nobody else has; what is in the way if there is none.

    Called by who may change the user. `number`: of this sandbox on this machine. `own_tree`: the sandbox has a tree of
    files of its own, in which only the last folders of the paths decide on who may read.
    """
    for path in view.needed if own_tree else (*view.needed, *view.code):
        steps = [path] if own_tree else [path, *map(str, Path(path).parents)]
        if unreadable := [step for step in steps if not others_can_read(step)]:
            return Missing(Boundary.USER, f"other users may not read {unreadable[0]}")
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= FIRST_USER and FIRST_USER + number < first + count:
            return FIRST_USER + number
        if count >= FEWEST_USERS:  # in a container whose users are a range of the host's
            return first + count - 1 - number % (count // 2)
    return Missing(Boundary.USER, "no other user exists in this user namespace")


def become(user: int | None) -> None:
    """Becomes `user`, if one is given, and gives up every right. Nothing that this process starts has more."""
    syscalls.forgo_capabilities()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    syscalls.drop_capabilities()
    syscalls.gain_no_privileges()
    syscalls.stay_inspectable()


@dataclass(frozen=True)
class Size:
    """Bytes of address space that a process takes."""

    data: int
    whole: int

    @classmethod
    def now(cls) -> "Size":
        """The size of this process."""
        held = _status()
        return cls(_bytes(held["VmData"]), _bytes(held["VmSize"]))


def limit(memory_mb: int, beyond: Size, largest_file_mb: int, processes: int | None) -> None:
    """Sets the limits of this process and of each that it starts. Allocating more than `memory_mb` beyond that size
    raises MemoryError. `processes`: most processes of its user; None if that user has processes elsewhere."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, largest_file_mb << 20)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, processes)
    _lower(resource.RLIMIT_DATA, beyond.data + (memory_mb << 20))
    _lower(resource.RLIMIT_AS, beyond.whole + (memory_mb << 20) + MAPPED_LIBRARIES)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _bytes(kilobytes: str) -> int:
    return int(kilobytes.split()[0]) * 1024


def kernel_counts_by_namespace() -> bool:
    """Whether the limit of processes counts those of a user namespace apart from others of the same user (Linux
    5.14)."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)
