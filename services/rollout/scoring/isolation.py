"""Restrictions of a scoring process before it runs a user's code: no network, limited memory, no life after its parent.

The kernel enforces each of them; they exist on Linux only. Where the kernel does not allow one, the caller is told.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
MAPPED_LIBRARIES = 4 << 30
"""Bytes of address space for mapped files. Libraries count there, although they take little memory."""


def leave_network() -> str | None:
    """Moves this process into a new network namespace without interfaces. Call it before the first thread starts.

    Needs root, or user namespaces that every user may create. Returns why it failed, or None.
    """
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no network namespaces"
    if _unshare(CLONE_NEWNET) == 0:
        return None
    user, group = os.getuid(), os.getgid()
    if code := _unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return os.strerror(code)
    # Maps user and group to themselves. Where that is not allowed, the process has the same rights under other ids.
    with contextlib.suppress(OSError):
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", file).write_text(line)
    return None


def _unshare(flags: int) -> int:
    """Calls unshare(2): 0, or the error number."""
    return 0 if _libc().unshare(flags) == 0 else ctypes.get_errno()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, lifeline: int) -> None:
    """Has this process and its group killed when the other end of the pipe `lifeline` is closed everywhere.

    The kernel does it, so it works while the user's code blocks the interpreter, and it also ends what that code
    started. If another process has inherited the other end, the death of the thread that started this process does the
    same, as soon as the interpreter is free. A change of user namespaces clears the latter: call this after
    `leave_network`.
    """
    if not sys.platform.startswith("linux"):
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    # A handler: SIGKILL as the signal could end this process before the kernel has killed the others of its group.
    signal.signal(signal.SIGRTMIN, lambda *_: os.killpg(os.getpgrp(), signal.SIGKILL))
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGRTMIN, 0, 0, 0)
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)


def limit_memory(megabytes: int) -> None:
    """Limits what this process can allocate beyond its present size. Allocating more raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sys.platform.startswith("linux"):
        return
    held = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    for kind, counter, spare in (
        (resource.RLIMIT_DATA, "VmData", 0),
        (resource.RLIMIT_AS, "VmSize", MAPPED_LIBRARIES),
    ):
        limit = int(held[counter].split()[0]) * 1024 + (megabytes << 20) + spare
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
