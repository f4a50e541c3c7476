"""Processes that end with the one that started them, and nothing of them left.

Linux gives two means. PR_SET_PDEATHSIG: the kernel signals a child when its parent dies, however it dies.
PR_SET_CHILD_SUBREAPER: grandchildren whose parent died become ours instead of init's, so that we can find and end them.
Elsewhere both are left out and only an orderly stop is clean.

`watchdog` is the process between the terminal and the supervisor. It does nothing but wait, so that it is still there
when the supervisor is not: then it ends every process that the supervisor left. If the watchdog itself is killed, the
kernel signals the supervisor, which stops the stack.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import IO

import psutil

from millrace.local.service_log import say

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def adopt_orphans() -> None:
    """Makes this process adopt orphaned descendants."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    on_parent_death: signal.Signals = signal.SIGTERM,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that a Ctrl-C at the terminal reaches only us; signalled when we die.

    Call it from the main thread: the kernel takes the death of the thread that forked for the parent's.
    """
    return subprocess.Popen(
        argv,
        env={**os.environ, **environment},
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid(), on_parent_death) if LINUX else None,
    )


def _die_with(parent: int, death: signal.Signals) -> Callable[[], None]:
    def between_fork_and_exec() -> None:
        assert _libc is not None
        _libc.prctl(PR_SET_PDEATHSIG, int(death), 0, 0, 0)
        if os.getppid() != parent:  # died before prctl: nobody is left to signal us
            os._exit(1)

    return between_fork_and_exec


def descendants(keep: Collection[int] = ()) -> list[psutil.Process]:
    """All processes below this one, save children whose pid is in `keep` and what is below those."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in keep:
            found.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                found.extend(child.children(recursive=True))
    return found


def sweep(keep: Collection[int] = (), grace_s: float = 3.0, limit_s: float = 15.0) -> list[int]:
    """Ends what `descendants(keep)` finds: SIGTERM, after `grace_s` SIGKILL, until nothing is left or `limit_s` passed.

    Returns the pids that were still there, which only happens to processes stuck in the kernel.
    """
    begun = time.monotonic()
    asked: set[int] = set()
    while left := [process for process in descendants(keep) if not _reaped(process)]:
        passed_s = time.monotonic() - begun
        if passed_s > limit_s:
            return [process.pid for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, PermissionError):
                if passed_s >= grace_s:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        time.sleep(0.05)
    return []


def _reaped(process: psutil.Process) -> bool:
    """Whether it has ended; an orphan that we adopted is ours to collect."""
    try:
        if process.ppid() == os.getpid():
            return bool(os.waitpid(process.pid, os.WNOHANG)[0])
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True


def watchdog(supervising: Sequence[str]) -> int:
    """Runs the command `supervising` until SIGINT, SIGTERM or SIGHUP, or until it fails; returns its exit status.

    A second signal does not wait for an orderly stop. Whatever happens, no process below the watchdog is left.
    """
    adopt_orphans()
    supervisor = start(supervising, {}, output=None)
    asked = 0

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        with contextlib.suppress(ProcessLookupError):
            supervisor.send_signal(signal.SIGTERM if asked == 1 else signal.SIGKILL)

    before = {n: signal.signal(n, ask_to_stop) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        status = _wait(supervisor)
        if asked == 1 and status == -signal.SIGTERM:
            status = 0  # it was asked to stop before it had begun
        if status < 0:
            say("millrace", f"the supervisor was ended by {signal.Signals(-status).name}; its services are stopped.")
        if left := sweep():
            say("millrace", f"processes {left} do not end.")
            return 1
        return status if status >= 0 else 1
    finally:
        for number, behaviour in before.items():
            signal.signal(number, behaviour)


def _wait(supervisor: subprocess.Popen[bytes]) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return supervisor.wait(timeout=1.0)
