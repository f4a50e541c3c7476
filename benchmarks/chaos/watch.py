"""Looks at a job until something has happened, and checks all the while what must always hold."""

import contextlib
import signal
import time
from dataclasses import dataclass

import psutil

from benchmarks.chaos.invariants import Terms, violations
from benchmarks.chaos.observation import Observer
from millrace.ids import JobId

LOOK_S = 0.05
OBSERVE_S = 0.5


@dataclass
class Watch:
    """One job, and what contradicts the lines of "What always holds"."""

    observer: Observer
    job_id: JobId
    terms: Terms
    patience_s: float
    """How long is waited for the next step."""

    def recovery(self, found: list[str], stopped: psutil.Process | None = None, stopped_s: float = 0.0) -> float | None:
        """The seconds until a step that begins from now on is completed; None where none is within the patience.

        Returns when `stopped` goes on as well: after `stopped_s`, or as soon as somebody has ended it.
        """
        began, began_unix_s = time.monotonic(), time.time()
        observed, recovered = began, None
        last = self.observer.step(self.job_id)
        while recovered is None or stopped is not None:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if stopped is not None and (now - began > stopped_s or ended(stopped)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    stopped.send_signal(signal.SIGCONT)
                stopped = None
            step = self.observer.step(self.job_id)
            if step is not None and step != last:  # a rewind goes back
                step_began_s = self.observer.step_began_s(self.job_id, step) if step > (last or 0) else None
                if recovered is None and step_began_s is not None and step_began_s >= began_unix_s:
                    recovered = now - began
                last = step
            if now - observed > OBSERVE_S:
                observed = now
                self.check(found)
            if now - began > self.patience_s + stopped_s:
                return None
        return recovered

    def check(self, found: list[str]) -> None:
        """Adds to `found` what contradicts a line now and is not in it yet."""
        seen = self.observer.observe(self.job_id)
        found += [problem for problem in (violations(seen, self.terms) if seen else []) if problem not in found]


def ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True
