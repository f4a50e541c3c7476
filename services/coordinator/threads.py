"""The threads for calls that wait: files of users, folders of jobs, names of hosts.

`asyncio.to_thread` has a fixed number of threads otherwise. As many calls on a network drive that hangs would take all
of them, and hold up every job and the end of the process.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

AT_A_TIME = 6
"""Calls that run side by side. More would take the interpreter from the event loop where they compute."""
SLOW_S = 2.0
"""A call that runs for longer waits for a disk or a network, and does not count any more."""
MOST = 256
"""Calls that run, those that do not count too. With as many no other one begins."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Threads(ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own, which the end of the process does not wait for. A
    ThreadPoolExecutor by type only, because event loops take no other default executor."""

    def __init__(self) -> None:
        super().__init__(1)
        self._changed = threading.Condition()
        self._begun: dict[Future[Any], float] = {}
        """The start of each call that runs, in time.monotonic()."""

    def submit(self, fn: Callable[Given, Answer], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Answer]:
        """Runs `fn` as soon as fewer than AT_A_TIME calls count."""
        future = Future[Answer]()
        work = partial(fn, *args, **kwargs)
        threading.Thread(target=self._run, args=(future, work), name="call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for no call: one that hangs would keep the process."""

    def _run(self, future: Future[Answer], work: Callable[[], Answer]) -> None:
        with self._changed:
            while (full_s := self._full_s()) > 0:
                self._changed.wait(full_s)
            self._begun[future] = time.monotonic()
        try:
            if future.set_running_or_notify_cancel():
                _answer(future, work)
        finally:
            with self._changed:
                del self._begun[future]
                self._changed.notify()

    def _full_s(self) -> float:
        """Seconds until it is worth to look again, if no call ends before; 0 if there is room now."""
        if len(self._begun) >= MOST:
            return SLOW_S
        now = time.monotonic()
        counted = sorted(began for began in self._begun.values() if now - began < SLOW_S)
        return counted[-AT_A_TIME] + SLOW_S - now if len(counted) >= AT_A_TIME else 0.0


def _answer(future: Future[Answer], work: Callable[[], Answer]) -> None:
    """Puts what `work` returns or raises into the future."""
    try:
        found = work()
    except BaseException as error:  # the caller gets it, as from every executor
        future.set_exception(error)
    else:
        future.set_result(found)
