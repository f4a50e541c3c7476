import os
import pty
import subprocess
import sys
from pathlib import Path

from rich.console import Console, Group

from millrace.cli.watch import Picture, panels, step_line
from millrace.rest import Event, FleetView, JobState, JobView, LedgerView, MemberView, StepMetrics

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
ROW = StepMetrics(step=12, time_s=0.0, values={"critic/rewards/mean": 0.43, "timing_s/step": 1.25, "other": 1.0})


def test_the_picture_has_what_one_wants_to_see() -> None:
    event = Event(id="1-0", time_s=0.0, kind="member.joined", message="rollout-1a2b3c4d [vllm] joined")
    fleet = FleetView(epoch=2, trainers=[], replicas=[REPLICA])
    console = Console(record=True, width=160, highlight=False)
    console.print(Group(*panels(Picture(JOB, LEDGER, fleet, {12: ROW}, [event]))))
    text = console.export_text()
    for told in ("running  version 12  reward 0.430  held-out 0.100 → –", "rollout-1a2b3c4d [vllm] joined"):
        assert told in text
    lines = [line.split() for line in text.splitlines()]
    assert ["208", "3", "5", "8", "192", "0"] in lines
    assert ["rollout-1a2b3c4d", "serving", "12", "40", "5", "1234"] in lines
    assert ["12", "0.430", "1.25"] in lines  # only columns that the series has


def test_a_step_in_one_line() -> None:
    assert step_line(ROW, JOB) == "step 12/60  reward 0.430  step s 1.25"


LIVE = """
import sys
from tests.cli.test_watch import JOB, LEDGER, ROW
from millrace.cli import watch
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
