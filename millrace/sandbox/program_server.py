"""Makes sandboxes and runs programs in them: `python -m millrace.sandbox.program_server`, started by `ProgramSandbox`.

Messages come on the standard input: {room} opens a sandbox and is answered with {missing}; then {program, timeout_s},
each answered with the fields of `Ended`; then {end}. Processes: this one; for each sandbox one that makes its
namespaces; the first process inside, which has the rights that the programs lack, starts them, and kills what is left.
The process that judges the outcome is outside: no program sees what is expected of it.
"""

import fcntl
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from millrace.sandbox import census, first, launch, privileges, syscalls, tree
from millrace.sandbox.boundaries import Boundary, Missing
from millrace.sandbox.messages import Limit, Verdict, receive, send
from millrace.sandbox.program import Room
from millrace.sandbox.view import interpreter

READ = 1 << 16
LONGEST_ERRORS = 2000
"""Characters of standard error that are kept, from its end."""
LONGEST_REPORT = 4 << 20
"""Bytes that a program may write to descriptor 3."""
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
MORE_USER_NAMESPACES = "/proc/sys/user/max_user_namespaces"


def main() -> None:
    """Serves until its standard input ends."""
    syscalls.end_with_parent(signal.SIGKILL)
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    while (opening := receive(requests)) is not None:
        maker = os.fork()
        if maker == 0:
            _make(Room(**opening["room"]), requests, replies)
        if os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) != 0:
            sys.exit("a sandbox failed")  # what is left in the pipe was meant for it


def _make(room: Room, requests: int, replies: int) -> NoReturn:
    """Makes the namespaces that only children enter, and waits for the first process inside."""
    status = first.BUG
    try:
        given = launch.prepare()
        syscalls.end_with_parent(signal.SIGKILL)
        pid = os.fork()
        if pid == 0:
            syscalls.end_with_parent(signal.SIGKILL)
            _Inside(room, given).serve(requests, replies)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0 if status == 0 else first.BUG)


class _Inside:
    """The first process of a sandbox."""

    def __init__(self, room: Room, given: first.Given) -> None:
        self._room, self._given = room, given
        self._wanted = first.Wanted(interpreter(), room.memory_mb, False, (), room.processes)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._size = privileges.Size.now()
        self._user, missing = first.separate(self._wanted, given)
        self._missing = missing or _forbid_user_namespaces(given)

    def serve(self, requests: int, replies: int) -> None:
        """Answers until the sandbox is to end."""
        send(replies, {"missing": [[each.boundary, each.reason] for each in self._missing]})
        while (request := receive(requests)) is not None and "program" in request:
            syscalls.unshare(syscalls.CLONE_NEWIPC)  # segments of the program before end with its namespace
            tree.empty_scratch(self._wanted.view, first.scratch_mb(self._wanted))
            send(replies, self._run(request["program"], request["timeout_s"]))

    def _run(self, program: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Runs a program to its end, and kills what it has started."""
        for name, text in program["files"].items():
            Path("/tmp", name).write_bytes(text.encode(errors="surrogatepass"))
        given = _sealed(program["input"])
        pipes = [os.pipe() for _ in range(3)]
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become(program["code"], (given, *(written for _, written in pipes)), timeout_s)
        for descriptor in (given, *(written for _, written in pipes)):
            os.close(descriptor)
        output, errors, report = (_Pipe(read) for read, _ in pipes)
        output.most, report.most = self._room.output_bytes, LONGEST_REPORT
        meter = census.Meter(self._room.memory_mb, self._room.processes, own_tree=True, own_segments=True)
        verdict = _watch(pid, meter, (output, errors, report), begun + timeout_s)
        seconds = time.monotonic() - begun
        _kill_all()
        for pipe in (output, errors, report):
            os.close(pipe.descriptor)
        return {
            "verdict": asdict(verdict),
            "output": output.text(),
            "errors": errors.text()[-LONGEST_ERRORS:],
            "report": report.text(),
            "seconds": seconds,
        }

    def _become(self, code: str, standard: tuple[int, ...], timeout_s: float) -> NoReturn:
        """Becomes the program."""
        try:
            first.become_code(self._wanted, self._given, self._user, self._size, standard)
            seconds = int(timeout_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code], ENVIRONMENT)
        except BaseException as error:
            os.write(2, f"the program did not start: {error!r}".encode())
        finally:
            os._exit(first.BUG)


def _forbid_user_namespaces(given: first.Given) -> list[Missing]:
    """Lets programs make no user namespace, in which they could mount files whose memory nobody counts. Returns what is
    missing."""
    if not given.users:
        return []
    try:
        Path(MORE_USER_NAMESPACES).write_text("0")
    except OSError as error:
        return [Missing(Boundary.LIMITS, f"{MORE_USER_NAMESPACES}: {error.strerror}")]
    return []


def _sealed(text: str) -> int:
    """A descriptor from which a program can read `text`, and to which it cannot write."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class _Pipe:
    """What a program writes to one of its descriptors."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.most: int | None = None
        """Bytes after which the program is ended; None: the last ones are kept, and there is no limit."""
        self._held = bytearray()

    def read(self) -> bool:
        """Takes what is there. Returns whether there may be more."""
        try:
            part = os.read(self.descriptor, READ)
        except BlockingIOError:
            return False
        self._held += part
        if self.most is None:
            del self._held[:-READ]
        return bool(part)

    @property
    def full(self) -> bool:
        return self.most is not None and len(self._held) > self.most

    def text(self) -> str:
        return bytes(self._held[: self.most]).decode(errors="replace")


def _watch(pid: int, meter: census.Meter, pipes: tuple[_Pipe, ...], deadline: float) -> Verdict:
    """Waits until the program ends, or passes a limit. What its descendants print afterwards is not read."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, *(pipe.descriptor for pipe in pipes)):
        poll.register(descriptor, select.POLLIN)
    look = 0.0
    try:
        while True:
            now = time.monotonic()
            if now >= deadline:
                return Verdict(limit=Limit.TIME)
            if now >= look:
                if (limit := meter.passed()) is not None:
                    return Verdict(limit=limit)
                look = now + max(first.LOOK_S, first.SHARE_OF_TIME * (time.monotonic() - now))
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(look, deadline) - now) * 1000)}
            for pipe in pipes:
                if pipe.descriptor in ready and not pipe.read():
                    poll.unregister(pipe.descriptor)
            if any(pipe.full for pipe in pipes):
                return Verdict(limit=Limit.OUTPUT)
            if (verdict := first.collect(pid)) is not None:
                return _after(verdict, pipes)
    finally:
        os.close(ended)


def _after(verdict: Verdict, pipes: tuple[_Pipe, ...]) -> Verdict:
    """How a program ended, after what it had printed is read."""
    for pipe in pipes:
        while not pipe.full and pipe.read():
            continue
    if any(pipe.full for pipe in pipes):
        return Verdict(limit=Limit.OUTPUT)
    return Verdict(limit=Limit.TIME) if verdict.signal == signal.SIGXCPU else verdict


def _kill_all() -> None:
    """Kills all processes of the sandbox but this one, and collects them."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            continue


if __name__ == "__main__":
    main()
