"""What a scoring process gives up before it runs a user's code: network, memory without bound, outliving its parent.

Each is the kernel's doing and Linux only. Where the kernel does not allow one, the caller is told and goes on.
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
"""Bytes of address space for files that are mapped: libraries count there, but take no memory of their own."""


def leave_network() -> str | None:
    """Moves into a network namespace of its own, without any interface. Call it before the first thread starts.

    Needs root, or user namespaces that are open to everybody. Returns why it could not.
    """
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no network namespaces"
    if _unshare(CLONE_NEWNET) == 0:
        return None
    user, group = os.getuid(), os.getgid()
    if code := _unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return os.strerror(code)
    # Lets the process see its user and group under their names; its rights are the same where that is not allowed.
    with contextlib.suppress(OSError):
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", file).write_text(line)
    return None


def _unshare(flags: int) -> int:
    """0, or the error number."""
    return 0 if _libc().unshare(flags) == 0 else ctypes.get_errno()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, lifeline: int) -> None:
    """Has this process and its group killed when nobody holds the other end of the pipe `lifeline` any more.

    The kernel does that, so it works while code holds the interpreter, and takes along what the user's code started.
    Should somebody else have inherited the other end, the death of the thread that started this process does the same
    as soon as the interpreter is free. Changing user namespaces forgets the latter, so call this after `leave_network`.
    """
    if not sys.platform.startswith("linux"):
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    # A handler, since SIGKILL here could end this process before the kernel has killed the others for the lifeline.
    signal.signal(signal.SIGRTMIN, lambda *_: os.killpg(os.getpgrp(), signal.SIGKILL))
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGRTMIN, 0, 0, 0)
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)


def limit_memory(megabytes: int) -> None:
    """Bounds what this process can allocate beyond what it holds now. Asking for more raises MemoryError."""
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
