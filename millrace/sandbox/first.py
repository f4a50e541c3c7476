"""The first process of a sandbox: makes its boundaries, starts the code in them, counts, collects what ended."""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from millrace.sandbox import census, privileges, syscalls, tree
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.messages import Verdict
from millrace.sandbox.syscalls import forbid_user_namespaces
from millrace.sandbox.view import View

Work = Callable[[Sequence[Missing]], None]
"""The code to run inside. It gets the list of missing boundaries."""
LOOK_S = 0.05
"""Shortest time between two counts."""
SHARE_OF_TIME = 50
"""Least time between two counts, in multiples of the time that a count takes."""
FIRST_COPY = 64
"""Copies of descriptors get numbers from here on."""
BUG = 70
"""Exit status of a first process with a bug."""


@dataclass(frozen=True)
class Wanted:
    """What a sandbox is to be."""

    view: View
    memory_mb: int
    """Memory of all processes and files together, beyond what Python itself takes."""
    network: bool
    """Whether the network of the machine can be reached."""
    kept: tuple[int, ...]
    """Descriptors, besides its standard ones, that the code keeps."""
    processes: int = privileges.PROCESSES
    """Most processes and threads together."""
    user_namespaces: bool = True
    """Whether the code may make user namespaces, as sandboxes inside this one need them."""
    loopback: bool = False
    """Whether there is a loopback if the network of the machine cannot be reached."""


@dataclass(frozen=True)
class Given:
    """What the process that starts the sandbox has made already."""

    number: int
    """Number of the sandbox on this machine."""
    processes: bool
    """The first process has a PID namespace."""
    users: bool
    """The first process has a user namespace."""
    missing: tuple[Missing, ...]


def run(wanted: Wanted, given: Given, control: int, output: int, work: Work) -> NoReturn:
    """Runs `work` with its standard output and error in `output`, and reports how it ended over the socket
    `control`."""
    try:
        syscalls.end_with_parent(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        size = privileges.Size.now()
        user, missing = separate(wanted, given)
        code = os.fork()
        if code == 0:
            become_code(wanted, given, user, size, (0, output, output))
            work(missing)
            os._exit(0)
        for descriptor in wanted.kept:
            os.close(descriptor)
        _tell(control, _watch(code, _meter(wanted, given, missing)))
        os._exit(0)
    except BaseException:
        import traceback

        os.write(output, traceback.format_exc().encode())
        os._exit(BUG)


def _tell(control: int, verdict: Verdict) -> None:
    with socket.socket(fileno=control) as channel, contextlib.suppress(BrokenPipeError):
        channel.send(verdict.encode())


def separate(wanted: Wanted, given: Given) -> tuple[int | None, list[Missing]]:
    """Enters the namespaces. Returns the user that the code becomes, None for the same, and what is missing."""
    missing = list(given.missing)
    flags = {Boundary.IPC: syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS, Boundary.NETWORK: syscalls.CLONE_NEWNET}
    if wanted.network:
        del flags[Boundary.NETWORK]
    for boundary, flag in flags.items():
        try:
            syscalls.unshare(flag)
        except OSError as error:
            missing.append(Missing(boundary, str(error.strerror)))
        else:
            if boundary is Boundary.NETWORK and wanted.loopback:
                syscalls.raise_loopback()
    changes = privileges.may_change_user() and not given.users
    user = privileges.own_user(wanted.view, given.number, own_tree=True) if changes else None
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        other = isinstance(user, int)
        missing += tree.enter(wanted.view, scratch_mb(wanted), processes=given.processes, as_other_user=other)
    except OSError as error:
        missing.append(Missing(Boundary.FILES, str(error.strerror)))
        if given.processes:
            missing.append(Missing(Boundary.LIMITS, "needs a tree of files of its own"))
        user = privileges.own_user(wanted.view, given.number, own_tree=False) if changes else None
    if isinstance(user, Missing):
        return None, [*missing, user]
    return user, missing


def become_code(wanted: Wanted, given: Given, user: int | None, size: privileges.Size, standard: Sequence[int]) -> None:
    """Makes this process the one that runs the code: in a session of its own, with `standard` as its descriptors from 0
    on and without any other that is not kept, with the limits of `wanted` beyond `size`, as `user`, in /tmp."""
    # Copies first: a descriptor may have the number that another one of them is to have.
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_COPY) for descriptor in standard]
    for number, descriptor in enumerate(copies):
        os.dup2(descriptor, number)
    others = set(map(int, os.listdir("/proc/self/fd"))) if os.path.isdir("/proc/self") else set(range(3, 256))
    for descriptor in others - {*range(len(standard)), *wanted.kept}:
        try:
            os.close(descriptor)
        except OSError:
            continue
    os.setsid()
    counted = user is not None or (given.users and privileges.kernel_counts_by_namespace())
    processes = wanted.processes if counted else None
    privileges.limit(wanted.memory_mb, size, scratch_mb(wanted), processes)
    privileges.become(user)
    if not wanted.user_namespaces:
        forbid_user_namespaces()
    syscalls.end_with_parent(signal.SIGKILL)
    os.chdir("/tmp")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def scratch_mb(wanted: Wanted) -> int:
    """Size of each folder that can be written: both together cannot reach the limit by themselves."""
    return max(1, wanted.memory_mb // 2)


def _meter(wanted: Wanted, given: Given, missing: Sequence[Missing]) -> census.Meter | None:
    lacking = {each.boundary for each in missing}
    if Boundary.LIMITS in lacking:
        return None
    own_segments = Boundary.IPC not in lacking
    return census.Meter(wanted.memory_mb, wanted.processes, own_tree=given.processes, own_segments=own_segments)


def _watch(code: int, meter: census.Meter | None) -> Verdict:
    """Waits until the code ends or a limit is passed. SIGCHLD is blocked."""
    while True:
        if (ended := collect(code)) is not None:
            return ended
        begun = time.monotonic()
        if meter is not None and (limit := meter.passed()) is not None:
            return Verdict(limit=limit)
        pause_s = max(LOOK_S, SHARE_OF_TIME * (time.monotonic() - begun))
        signal.sigtimedwait({signal.SIGCHLD}, pause_s)


def collect(code: int) -> Verdict | None:
    """Collects all children that have ended, orphans too. Returns how the code ended, None while it runs."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return Verdict(signal=signal.SIGKILL)
        if pid == 0:
            return None
        if pid == code:
            ended = os.waitstatus_to_exitcode(status)
            return Verdict(status=ended) if ended >= 0 else Verdict(signal=-ended)
