"""The local stack for programs: up inside a `with`, down and gone after it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from millrace.client import Client
from millrace.errors import Unavailable
from millrace.local import child_processes
from millrace.local.options import StackOptions


class Stack:
    """A running local stack. Entering waits for every member to join, at most `ready_s`; raises Unavailable."""

    def __init__(self, options: StackOptions, ready_s: float = 300.0) -> None:
        self.options = options
        self._ready_s = ready_s
        self._console = Path(options.state) / "logs" / "console.log"
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._console.parent.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, "-m", "millrace.local", "watchdog", self.options.to_json())
        with self._console.open("wb") as console:
            self._watchdog = child_processes.start(argv, {}, console)
        deadline = time.monotonic() + self._ready_s
        try:
            while not self._state().get("complete"):
                if self._watchdog.poll() is not None:
                    raise self._failed("did not start")
                if time.monotonic() > deadline:
                    raise self._failed(f"was not complete within {self._ready_s:g} s")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def coordinator(self) -> str:
        """Further replicas take these addresses: host:port of each coordinator's gRPC server, with commas."""
        return self.options.coordinator

    def client(self, **options: Any) -> Client:
        return Client(self.url, **options)

    def pids(self) -> dict[str, int]:
        """Pid of each service that runs now, by name: coordinator, trainer, rollout-0, ..."""
        return dict(self._state().get("processes", {}))

    def stop(self, within_s: float = 90.0) -> None:
        """Ends everything. Idempotent."""
        if self._watchdog is None or self._watchdog.poll() is not None:
            return
        self._watchdog.send_signal(signal.SIGTERM)
        try:
            self._watchdog.wait(within_s)
        except subprocess.TimeoutExpired:
            self._watchdog.send_signal(signal.SIGTERM)  # the second one does not wait for an orderly stop
            self._watchdog.wait(30.0)

    def _state(self) -> dict[str, Any]:
        """What the supervisor wrote last, if it is the one of this stack's life."""
        try:
            state = json.loads((Path(self.options.state) / "stack.json").read_text())
        except FileNotFoundError:
            return {}
        return state if self._watchdog is not None and state["watchdog"] == self._watchdog.pid else {}

    def _failed(self, how: str) -> Unavailable:
        output = self._console.read_text(errors="replace")[-3000:]
        return Unavailable(f"the local stack {how}:\n{output}", f"look at {self._console.parent}.")
