"""The process between the terminal and the supervisor.

It does nothing but wait, so that it is still there when the supervisor is not: then it ends every process that the
supervisor left. If the watchdog itself is killed, the kernel tells the supervisor, which stops the stack.
"""

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from millrace.local import child_processes
from millrace.local.service_log import say


def watchdog(supervising: Sequence[str]) -> int:
    """Runs the command `supervising` until SIGINT, SIGTERM or SIGHUP, or until it fails; returns its exit status.

    A second signal does not wait for an orderly stop. Whatever happens, no process below the watchdog is left.
    """
    child_processes.adopt_orphans()
    supervisor = child_processes.start(supervising, {}, output=None)
    asked = 0

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        with contextlib.suppress(ProcessLookupError):
            supervisor.send_signal(signal.SIGTERM if asked == 1 else signal.SIGKILL)

    before = {n: signal.signal(n, ask_to_stop) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        status = _wait(supervisor)
        if status < 0:
            say("millrace", f"the supervisor was ended by {signal.Signals(-status).name}; its services are stopped.")
        if left := child_processes.sweep():
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
