"""No orphans: an engine's processes end with the replica, however the replica ends."""

import ctypes
import os
import signal

import psutil

PR_SET_PDEATHSIG = 1
REPLICA_PID = "MILLRACE_REPLICA_PID"
"""Environment variable through which an engine's processes know whose they are."""


def own_descendants() -> None:
    """Marks this process as the replica whose engine processes `hold_on` to it."""
    os.environ[REPLICA_PID] = str(os.getpid())


def hold_on() -> None:
    """In a process of an engine: asks the kernel to end it with its parent, and ends it if the replica is gone
    already. Does nothing in the replica itself and in a process that belongs to none.

    The kernel watches the parent's *thread* that made this process, so an engine has to be started from a thread that
    lives as long as it.
    """
    replica = int(os.environ.get(REPLICA_PID, "0"))
    if replica in (0, os.getpid()):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A Ctrl-C at the terminal goes to the whole foreground group; the replica decides what it means for the engine.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if not psutil.pid_exists(replica):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants(process: psutil.Process | None = None, wait_s: float = 5.0) -> None:
    """Ends every process below `process` (this one unless given), at once, and waits until they are gone."""
    children = (process or psutil.Process()).children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=wait_s)
