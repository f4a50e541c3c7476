"""Starts the processes of one service again, forked from a process that has imported what they need.

The process that forks is multiprocessing's fork server. It imports once, and starts no thread and no CUDA, so that
processes which are started again after a failure are there within a second.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType

import psutil
import structlog

from millrace.local.folders import short_sockets
from millrace.local.lives import Life, Restarts
from millrace.wire import last_words
from millrace.wire.membership import DRAINED_FILE, LIFE_FILE

log = structlog.get_logger(__name__)
FORKING = multiprocessing.get_context("forkserver")
"""Starts processes as "spawn" does, without their imports: nothing of the launcher's memory is in them."""
RESTARTS = Restarts(limit=3, window_s=600.0, first_wait_s=0.1, longest_wait_s=1.0)
"""Processes that fail more often before they have joined the fleet end the launcher. The program that started it
decides then."""

LOOK_S = 0.5
"""How often the launcher looks whether its processes show life."""
STANDBY = "MILLRACE_STANDBY"
"""Environment variable of a launcher that imports and then waits for a line on its standard input, until another
launcher of the service has ended."""


def fork_from(*modules: str) -> None:
    """The modules that are imported before a process is forked. Call it before the first one is."""
    short_sockets()
    FORKING.set_forkserver_preload(list(modules))


def stand_by() -> None:
    """A process that was started as a standby imports, and returns when it has to take over. It ends when its parent
    has ended. Any other process returns at once."""
    if os.environ.pop(STANDBY, ""):
        forkserver.ensure_running()
        if not sys.stdin.readline():
            raise SystemExit(0)


class Launcher:
    """The processes of one service on this host, from start to end.

    They live and end together: if one ends with a failure, the others are killed, and all are started anew. They are
    started anew also if they ended in order and neither this process nor `millrace drain` has asked them to.
    """

    def __init__(
        self, processes: Callable[[], Sequence[ForkServerProcess]], restarts: Restarts, silent_s: float = math.inf
    ) -> None:
        """`processes` makes those of one life; they are not started yet. `restarts` bounds their number of lives that
        do not join the fleet. A member that has not tried to reach the coordinator for `silent_s` stands still, and is
        killed."""
        self._processes, self._restarts, self._silent_s = processes, restarts, silent_s
        self._running: Sequence[ForkServerProcess] = ()
        self._stopping = False

    def run(self) -> int:
        """Returns the exit status: 0 if the processes were drained, 1 if they ended too often."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with (
            _file(DRAINED_FILE) as drained,
            _file(LIFE_FILE) as self._life,
            _file(last_words.FOLDER) as words,
        ):
            return self._keep(drained, words)

    def _keep(self, drained: Path, words: Path) -> int:
        while not self._stopping:
            began, life = time.monotonic(), Life(words)
            failed = self._live()
            life.end(failed)
            if not failed and (self._stopping or drained.exists()):
                return 0
            if self._stopping:
                return 1
            wait_s = self._restarts.wait_s(time.monotonic(), joined=life.joined)
            details = {"ended": failed or "in order", "lived_s": round(time.monotonic() - began)}
            if wait_s is None:
                log.error("the processes ended too often and are not started again", **details)
                return 1
            log.error("the processes are started again", **details, wait_s=wait_s)
            time.sleep(wait_s)
        return 0

    def _live(self) -> str:
        """One life of the processes. Answers how the first of them failed; empty if all ended in order."""
        self._running = self._processes()
        self._life.unlink(missing_ok=True)
        try:
            for process in self._running:
                process.start()
            if self._stopping:  # asked to while they were started
                self._pass_on()
            left = {process.sentinel: process for process in self._running}
            while left:
                for sentinel in wait(list(left), LOOK_S):
                    assert isinstance(sentinel, int)
                    process = left.pop(sentinel)
                    process.join()
                    if process.exitcode != 0:
                        return f"{process.name} (pid {process.pid}) {_how(process.exitcode)}"
                if len(left) == len(self._running) and self._stands_still():
                    return f"they stood still for {self._silent_s:g} s"
            return ""
        except (EOFError, ConnectionError):
            return "the process that forks them ended"
        finally:
            self._clear()

    def _stands_still(self) -> bool:
        """Whether the member has begun to show life and has stopped to, while all of its processes run."""
        with contextlib.suppress(FileNotFoundError):
            return not self._stopping and time.monotonic() - self._life.stat().st_mtime > self._silent_s
        return False

    def _clear(self) -> None:
        """Kills what is left of one life: its other processes, and what those have started."""
        self._running = [process for process in self._running if process.pid is not None]
        pids = [process.pid for process in self._running if process.exitcode in (None, UNKNOWN)]
        # The children of this process are the fork server and multiprocessing's resource tracker.
        below = [p.pid for child in psutil.Process().children() for p in child.children(recursive=True)]
        for pid in {*pids, *below} - {None}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.join()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._pass_on()

    def _pass_on(self) -> None:
        for process in self._running:
            if process.pid is not None:
                process.terminate()


UNKNOWN = 255
"""The exit status of all processes if the one that forked them was killed, whether they have ended or not."""


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@contextlib.contextmanager
def _file(variable: str) -> Iterator[Path]:
    """The file by which a member reports to its launcher: the one that this process was given, if there is one."""
    if path := os.environ.get(variable):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        os.environ[variable] = str(Path(folder) / "file")
        yield Path(os.environ[variable])
