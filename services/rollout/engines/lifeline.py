"""An engine's processes end with the replica, however the replica ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Set
from multiprocessing.process import BaseProcess

import psutil

PR_SET_PDEATHSIG = 1
REPLICA_PID = "MILLRACE_REPLICA_PID"
"""Environment variable with the pid of the replica, for an engine's processes."""


def own_descendants() -> None:
    """Marks this process as the replica: engine processes that it starts can call `hold_on`."""
    os.environ[REPLICA_PID] = str(os.getpid())


def hold_on() -> None:
    """Called in an engine's process: the kernel kills it when its parent dies, and it ends at once if the replica is
    gone already. Does nothing in the replica itself, or in a process that belongs to no replica.

    The kernel watches the *thread* of the parent that started this process. Therefore an engine has to be started from
    a thread that lives as long as the engine.
    """
    replica = int(os.environ.get(REPLICA_PID, "0"))
    if replica in (0, os.getpid()):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Ctrl-C in a terminal goes to the whole foreground process group. The replica decides what it means for the engine.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if not psutil.pid_exists(replica):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_children(others: Set[BaseProcess]) -> None:
    """Kills what multiprocessing has started in this process, except `others`, and all below. Returns at once."""
    for child in multiprocessing.active_children():
        if child not in others and child.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(child.pid)
                kill_descendants(process, 0.0)
                process.kill()


def kill_descendants(process: psutil.Process | None = None, wait_s: float = 5.0) -> None:
    """Kills all descendants of `process` (default: this process) and waits up to `wait_s` until they are gone."""
    children = (process or psutil.Process()).children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=wait_s)
