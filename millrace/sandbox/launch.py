"""Starts a sandbox, and ends it as a whole: when its code ends, when it is asked to, or when its owner is gone.

Three processes: this one, which runs nothing of the user's; the first process of the sandbox, pid 1 of its PID
namespace, with whose end the kernel kills everything inside; and the one that runs the code.
"""

import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from millrace.sandbox import census, first, privileges, syscalls
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.messages import Verdict

LONGEST_OUTPUT = 16 << 20
"""Bytes that the code may print in its life. Further ones are left out: a log has no other bound."""
LAST_OUTPUT = 1 << 20
"""Bytes of output that are read after the code has ended, whose children may hold the pipe without a PID namespace, or
after the sandbox was asked to end, while the code still prints."""
LEFT_OUT = b"\n[the rest of the output of this scoring process is left out]\n"
END_S = 5.0
"""How long descendants without a PID namespace are killed again."""


def confine(wanted: first.Wanted, parent: int, control: int, work: first.Work) -> NoReturn:
    """Runs `work` in a sandbox, whose standard error is passed on to this process's, and ends this process after it.

    `control` is a socket to the process `parent`, which started this one: the parent reads the Verdict there, and ends
    the sandbox by closing its end. Standard input and output are the code's. Call it before the first thread starts.
    """
    if sys.platform != "linux":
        work([Missing(boundary, f"{sys.platform} has none") for boundary in Boundary])
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    given = prepare()
    syscalls.adopt_orphans()
    # Not SIGKILL: without a PID namespace this process has to end what the code has started.
    syscalls.end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    output, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(output)
        first.run(wanted, given, control, written, work)
    for descriptor in (written, *wanted.kept):
        os.close(descriptor)
    try:
        _wait(pid, control, output)
    finally:
        _end(pid, given.processes)
        os._exit(0)


def prepare() -> first.Given:
    """Makes the namespaces that only children enter, and the user namespace without which there are no others."""
    missing = []
    users = processes = False
    if not privileges.may_make_namespaces():
        try:
            _own_users()
            users = True
        except OSError as error:
            if not privileges.may_change_user():
                missing.append(Missing(Boundary.USER, str(error.strerror)))
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        processes = True
    except OSError as error:
        missing.append(Missing(Boundary.PROCESSES, str(error.strerror)))
    return first.Given(os.getpid(), processes, users, tuple(missing))


def _own_users() -> None:
    """Enters a user namespace in which this user and group are themselves, and nobody else exists."""
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as settings:
            settings.write(line)


def _wait(pid: int, control: int, output: int) -> None:
    """Passes the output on, until the first process has ended or the other end of `control` is closed, and what was
    printed before."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, control, output):
        poll.register(descriptor, select.POLLIN)
    left, last = LONGEST_OUTPUT, LAST_OUTPUT
    while last > 0:
        ready = {descriptor for descriptor, _ in poll.poll()}
        ends = bool(ready & {control, ended})
        if ends and output not in ready:
            return
        if not (text := os.read(output, 1 << 16)):
            poll.unregister(output)
        elif left > 0:
            left -= len(text)
            os.write(2, text if left > 0 else text + LEFT_OUT)
        if ends:
            last -= len(text)


def _end(pid: int, processes: bool) -> None:
    """Kills all of the sandbox, and returns when nothing of it is left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.waitpid(pid, os.WNOHANG) == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    deadline = time.monotonic() + END_S
    while not processes and (left := census.descendants()) and time.monotonic() < deadline:
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        _reap()
        time.sleep(0.01)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def verdict(channel: socket.socket) -> Verdict | None:
    """What the first process sent over the other end of `control`; None if it was killed before."""
    try:
        data = channel.recv(1 << 12, socket.MSG_DONTWAIT)
    except OSError:
        return None
    return Verdict.decode(data) if data else None
