"""What people read of faults."""

import math
from pathlib import Path

from benchmarks.chaos import table
from benchmarks.chaos.faults import Act, Fault, Target
from benchmarks.chaos.trial import Outcome, Struck
from millrace.events import EventKind

KILL = Fault(Target.RANK, Act.KILL, 0.5, 1.0, 0.0)
STOP = Fault(Target.REDIS, Act.STOP, 0.5, 1.0, 3.25)


def test_a_fault_is_a_line() -> None:
    assert table.line(Struck(STOP, 12.0, 1, 0.5)).split() == [
        "SIGSTOP",
        "Redis",
        "12.0",
        "s",
        "3.2",
        "s",
        "0.50",
        "s",
        "held",
    ]
    assert table.line(Struck(KILL, 12.0, 1, None)).split()[-2:] == ["never", "FAILED"]
    assert table.line(Struck(KILL, 12.0, 1, 1.0, found=["something"])).endswith("FAILED")


def test_kinds_have_their_median_and_where_the_seconds_went() -> None:
    faults = [Struck(KILL, 0.0, 1, float(n), {EventKind.TRAINER_LOST: 0.1 * n}) for n in (1, 2, 6)]
    faults += [Struck(STOP, 0.0, 1, None)]
    told = table.by_kind(faults).splitlines()
    assert told[2] == f"| Redis | SIGSTOP | 1 | {math.inf} s | {math.inf} s |  |"
    assert told[3] == "| trainer rank | SIGKILL | 3 | 2.0 s | 6.0 s | trainer.lost 0.2 |"


def test_a_failure_says_how_to_repeat_it() -> None:
    outcome = Outcome(7, 1, Path("/state/seed-7"), [Struck(KILL, 3.0, 42, None, found=["1: a count"])])
    assert not outcome.sound
    told = table.failure(outcome, table.repeating(7, ["--faults 3"], Path("state/chaos")))
    for part in ("pid 42", "1: a count", "no step", "--first 7 --seeds 1 --faults 3", "/state/seed-7/state/logs"):
        assert part in told
