"""What counts as recovery, with a job whose steps are told by a script."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import psutil

from benchmarks.chaos.faults import Act
from benchmarks.chaos.invariants import Terms
from benchmarks.chaos.observation import Observer
from benchmarks.chaos.trial import NUMBERS
from benchmarks.chaos.watch import Watch
from millrace.ids import JobId

UNDER_WAY_S, REWOUND_S, AGAIN_S = 0.2, 0.5, 0.8


class Scripted:
    """A job at step 7. The step under way is done soon; then the trainer is back at step 6 and takes step 7 again."""

    def __init__(self, at: Callable[[float], int | None]) -> None:
        self._at, self._began = at, time.time()

    def step(self, _: str) -> int | None:
        return self._at(time.time() - self._began)

    def step_began_s(self, _: str, step: int) -> float:
        return self._began - 1.0 if step == 8 else self._began + REWOUND_S

    def observe(self, _: JobId) -> Any:
        return None


def script(passed_s: float) -> int | None:
    if passed_s < UNDER_WAY_S:
        return 7
    if passed_s < REWOUND_S:
        return 8
    return 6 if passed_s < AGAIN_S else 7


def watch(at: Callable[[float], int | None], patience_s: float) -> Watch:
    return Watch(cast(Observer, Scripted(at)), JobId("job-1"), Terms(0), patience_s)


def test_a_step_that_was_under_way_is_no_recovery() -> None:
    recovery = watch(script, 60.0).recovery([])
    assert recovery is not None and recovery >= AGAIN_S


def test_a_job_that_takes_no_step_any_more_is_given_up() -> None:
    assert watch(lambda passed_s: 7 if passed_s < 0.1 else None, 0.5).recovery([]) is None


def test_what_was_stopped_goes_on_before_the_next_fault() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        stopped = psutil.Process(process.pid)
        stopped.send_signal(NUMBERS[Act.STOP])
        recovery = watch(script, 60.0).recovery([], stopped, 2 * AGAIN_S)
        assert recovery is not None and stopped.status() != psutil.STATUS_STOPPED
        process.kill()
