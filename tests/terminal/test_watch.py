import os
import pty
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from millrace.events import Event, MemberJoined
from millrace.ids import MemberId
from millrace.rest import FleetView, JobState, JobView, LedgerView, MemberView, StepMetrics
from millrace.terminal import watch
from millrace.terminal.watch import Snapshot, panels, step_line

JOB = JobView(
    id="job-0123456789ab",
    name="demo [x]",
    state=JobState.RUNNING,
    step=12,
    steps=60,
    version=12,
    reward=0.43,
    evaluation_before=0.1,
    evaluation_last=None,
    created_s=0.0,
    checkpoint=None,
    report=None,
    spec={},
)
LEDGER = LedgerView(issued=208, queued=3, leased=5, generated=8, trained=192, dropped=0, reasons={})
REPLICA = MemberView(
    id="rollout-1a2b3c4d",
    kind="rollout",
    address="127.0.0.1:1",
    engine="vllm",
    engine_release="0.32.0",
    world_size=1,
    host="here",
    device="cpu",
    state="serving",
    version=12,
    running=40,
    waiting=0,
    free=24,
    leases=5,
    tokens=9000,
    tokens_per_s=1234.5,
    silent_s=0.1,
)
REWARD = "critic/rewards/mean"
ROW = StepMetrics(step=12, time_s=0.0, values={REWARD: 0.43, "timing_s/step": 1.25, "other": 1.0})


def test_the_picture_has_what_one_wants_to_see() -> None:
    joined = MemberJoined(member=MemberId(REPLICA.id), epoch=1)
    event = Event(id="1-0", time_s=0.0, message="rollout-1a2b3c4d [vllm] joined", data=joined)
    fleet = FleetView(epoch=2, trainers=[], replicas=[REPLICA])
    console = Console(record=True, width=160, highlight=False)
    console.print(Group(*panels(Snapshot(JOB, LEDGER, fleet, {12: ROW}, [event]))))
    text = console.export_text()
    for told in ("running  version 12  reward 0.430  held-out 0.100", "rollout-1a2b3c4d [vllm] joined"):
        assert told in text
    lines = [line.split() for line in text.splitlines()]
    assert ["208", "3", "5", "8", "192", "0"] in lines
    assert ["rollout-1a2b3c4d", "serving", "12", "40", "5", "1234"] in lines
    assert ["12", "0.430", "1.25"] in lines  # only columns whose metric the rows have


def test_a_step_in_one_line() -> None:
    assert step_line(ROW, JOB) == "step 12/60  reward 0.430  step s 1.25"


class GoesBack:
    """A job that is looked at after each of `steps`. A step's reward says how often it was trained."""

    def __init__(self, *steps: int) -> None:
        self._steps, self._step = [0, *steps], 0
        self._trained: Counter[int] = Counter()

    def job(self, job: str) -> JobView:
        before, self._step = self._step, self._steps.pop(0)
        self._trained.update(range(before + 1, self._step + 1))
        return JOB.model_copy(
            update={"step": self._step, "state": JobState.RUNNING if self._steps else JobState.SUCCEEDED}
        )

    def metrics(self, job: str, after_step: int) -> list[StepMetrics]:
        return [
            StepMetrics(step=n, time_s=0.0, values={REWARD: float(self._trained[n]), watch.LAST_METRIC: 0.0})
            for n in range(after_step + 1, self._step + 1)
        ]

    def ledger(self, job: str) -> LedgerView:
        return LEDGER

    def fleet(self) -> FleetView:
        return FleetView(epoch=1, trainers=[], replicas=[])

    def events(self, job: str, after: str, follow: bool) -> list[Event]:
        return []


def test_steps_that_are_trained_again_are_shown_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.0)
    client: Any = GoesBack(3, 4, 1, 2, 4, 5)
    assert watch.follow(client, JOB.id) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    told = " ".join(f"{line[1].partition('/')[0]}:{line[3]}" for line in lines)
    assert told == "1:1.000 2:1.000 3:1.000 4:1.000 2:2.000 3:2.000 4:2.000 5:1.000"


def test_whoever_detaches_from_json_reads_nothing_else_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def detach(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "show_live", detach)
    client: Any = None
    for as_json in (True, False):
        assert watch.follow(client, JOB.id, as_json) == 0
        told = capsys.readouterr()
        assert ("detached" in told.err, "detached" in told.out) == (as_json, not as_json)


LIVE = """
import sys
from tests.terminal.test_watch import JOB, LEDGER, ROW
from millrace.terminal import watch
from millrace.rest import FleetView, JobState

class Told:
    jobs = [JOB, JOB, JOB.model_copy(update={"state": JobState.SUCCEEDED, "step": 60, "evaluation_last": 0.9})]
    def job(self, job): return self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
    def ledger(self, job): return LEDGER
    def fleet(self): return FleetView(epoch=1, trainers=[], replicas=[])
    def metrics(self, job, after_step): return [ROW]
    def events(self, job, after, follow): return iter(())

sys.exit(watch.follow(Told(), JOB.id))
"""


def test_at_a_terminal_there_is_a_bar_and_a_table() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "50"}
    root = Path(__file__).resolve().parents[2]
    watching = subprocess.Popen([sys.executable, "-c", LIVE], stdout=theirs, env=environment, cwd=root)
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert watching.wait(30) == 0
    text = told.decode()
    assert "step 12/60" in text and "step 60/60" in text and "\x1b[" in text and "━" in text
    assert "demo [x]" in text and "succeeded" in text
