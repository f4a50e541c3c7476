"""`millrace top`: what it shows, and how it leaves the terminal."""

import functools
import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millrace.cli import app, top
from millrace.cli.jobs import fleet_rows, jobs_rows
from millrace.cli.top import Frame, pace, picture
from millrace.client import Client
from millrace.errors import Unavailable
from millrace.rest import (
    FleetView,
    GpuView,
    HostView,
    JobState,
    JobSummary,
    MemberState,
    StepMetrics,
    WaitingFor,
    WaitingView,
    WarningCause,
    WarningView,
)
from tests.terminal.test_watch import JOB, REPLICA

WAITING = JOB.model_copy(
    update={
        "id": "job-00000000000a",
        "state": JobState.QUEUED,
        "waiting": WaitingView(reason=WaitingFor.EARLIER_JOB, message="waits for job-0123456789ab [first]"),
        "step": 0,
    }
)
WARNED = JOB.model_copy(
    update={
        "warnings": [
            WarningView(cause=WarningCause.EQUAL_REWARDS, step=4, message="gone", over=True),
            WarningView(cause=WarningCause.RESPONSES_CUT, step=9, message="responses [cut]"),
        ]
    }
)
FAILED = JOB.model_copy(update={"id": "job-00000000000f", "state": JobState.FAILED, "failure": "no memory. Fix: less."})
ROWS = [
    StepMetrics(
        step=n, time_s=0.0, values={"timing_s/step": 2.0, "timing_s/testing": t, "perf/total_num_tokens": 500.0}
    )
    for n, t in ((11, 0.0), (12, 1.0))
]
TROUBLED = REPLICA.model_copy(update={"id": "rollout-2", "state": MemberState.JOINING, "trouble": "no [GPU]"})
UNKNOWN = {"power_w": None, "temperature_c": None}
FLEET = FleetView(epoch=3, trainers=[], replicas=[REPLICA, TROUBLED])


class Coordinator:
    """Jobs and fleet as the client would get them."""

    url = "http://127.0.0.1:7700"

    def __init__(self, *jobs: JobSummary, fleet: FleetView = FLEET) -> None:
        self._jobs, self._fleet = jobs, fleet

    def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[JobSummary]:
        return [job for job in self._jobs if state in (None, job.state)][:limit]

    def metrics(self, job: str, after_step: int = 0) -> list[StepMetrics]:
        return [row for row in ROWS if row.step > after_step]

    def fleet(self) -> FleetView:
        return self._fleet


def shown(*jobs: JobSummary, fleet: FleetView = FLEET, members: int = 50) -> list[str]:
    client: Any = Coordinator(*jobs, fleet=fleet)
    console = Console(record=True, width=200, highlight=False, file=io.StringIO())
    console.print(picture(top.frame(client), members))
    return console.export_text().splitlines()


def test_one_sees_jobs_pace_time_left_what_waits_and_the_fleet() -> None:
    lines = [line.rstrip() for line in shown(WARNED, WAITING, FAILED)]
    # 48 steps are left, of 2.5 s with the evaluation; 1,000 tokens in 4 s of steps.
    (running,) = [line.split()[1:] for line in lines if line.startswith(JOB.id) and "running" in line]
    assert running == ["demo", "[x]", "running", "12/60", "12", "0.430", "0.100", "2.5", "250", "–", "2m00s"]
    assert f"{WAITING.id} waits: waits for job-0123456789ab [first]" in lines
    assert f"{JOB.id} warning after step 9: responses [cut]" in lines and not any("gone" in line for line in lines)
    assert f"{FAILED.id} failed: no memory. Fix: less." in lines
    assert "rollout-2 could not be configured: no [GPU]" in lines
    assert "epoch 3  trainers: none  replicas: 1 serving, 1 joining" in lines
    assert "2,469 tokens/s generated, 10 leases, 80 samples running, 0 waiting, 48 free" in lines
    members = [line.split()[:2] for line in lines if line.startswith("rollout-") and "could not" not in line]
    assert members == [["rollout-2", "joining"], [REPLICA.id, "serving"]]  # those that need a look come first


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_gets_whole_columns(width: int) -> None:
    long = JOB.model_copy(update={"evaluation_before": 0.078, "evaluation_last": 0.969, "evaluation_step": 60})
    client: Any = Coordinator(long, fleet=FLEET)
    views: dict[str, Any] = {
        "top": picture(top.frame(client), 50),
        "jobs": jobs_rows([long]),
        "fleet": fleet_rows(FLEET),
    }
    for name, view in views.items():
        console = Console(record=True, width=width, highlight=False, file=io.StringIO())
        console.print(view)
        printed = console.export_text()
        assert "…" not in printed and max(map(len, printed.splitlines())) <= width, f"{name}\n{printed}"
        ids = [JOB.id] if name == "jobs" else [REPLICA.id, TROUBLED.id]
        assert all(each in printed for each in ids) and "STATE" in printed, f"{name}\n{printed}"


def test_what_a_member_uses_is_shown() -> None:
    host = HostView(host="here", process_bytes=2_000_000_000, used_bytes=30_000_000_000, size_bytes=64_000_000_000)
    gpus = [
        GpuView(host="here", gpu=number, used_bytes=40_000_000_000, size_bytes=80_000_000_000, busy=busy, **UNKNOWN)
        for number, busy in (("0", 0.9), ("1", 0.5), ("2", None))
    ]
    using = REPLICA.model_copy(update={"cache_used": 0.375, "hosts": [host], "gpus": gpus})
    for member, expected in ((using, "38% 70% 120.0/240 2.0 in 30.0/64"), (REPLICA, "– – – –")):
        lines = shown(fleet=FleetView(epoch=3, trainers=[], replicas=[member]))
        (line,) = [line for line in lines if line.startswith(REPLICA.id)]
        assert f" {expected} vllm " in " ".join(line.split())


def test_many_members_are_cut_where_there_is_no_room() -> None:
    many = FleetView(epoch=1, trainers=[], replicas=[REPLICA] * 200)
    lines = shown(JOB, fleet=many, members=5)
    assert sum(line.startswith(REPLICA.id) for line in lines) == 5
    assert lines[-1].strip() == "and 195 more: millrace fleet"


def test_nothing_at_all_is_said_so() -> None:
    text = "\n".join(shown(fleet=FleetView(epoch=0, trainers=[], replicas=[])))
    assert "There are no jobs." in text and "No trainers or replicas are connected." in text


def test_the_pace_needs_a_step_with_its_duration() -> None:
    assert pace(JOB, []) is None and pace(JOB, [StepMetrics(step=1, time_s=0.0, values={"actor/lr": 1.0})]) is None
    endless = pace(JOB.model_copy(update={"steps": 0}), ROWS)
    assert endless is not None and endless.left_s is None and endless.step_s == 2.5
    odd = pace(JOB, [StepMetrics(step=1, time_s=0.0, values={"timing_s/step": 0.0})])
    assert odd is not None and odd.tokens_per_s == 0.0 and math.isfinite(odd.left_s or 0.0)


def test_once_prints_one_picture_and_json_the_same_as_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(JOB, FAILED)
    for name in ("jobs", "metrics", "fleet"):
        monkeypatch.setattr(Client, name, lambda self, *a, _name=name, **k: getattr(coordinator, _name)(*a, **k))
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 0 and "12/60" in result.stdout and "\x1b" not in result.stdout
    tree = json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout)
    assert [job["id"] for job in tree["jobs"]] == [JOB.id, FAILED.id]
    assert tree["paces"][JOB.id] == {"step_s": 2.5, "tokens_per_s": 250.0, "left_s": 120.0}
    assert len(tree["fleet"]["replicas"]) == 2


def test_a_coordinator_that_does_not_answer_is_named_below_the_last_picture() -> None:
    client: Any = Coordinator(JOB)
    frames = [top.frame(client), Unavailable("no answer", "wait"), KeyboardInterrupt()]
    drawn: list[str] = []

    def record(shown: Frame, members: int, trouble: str = "") -> str:
        drawn.append(trouble)
        return ""

    def next_frame(client: Client) -> Frame:
        found = frames.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(top, "picture", record)
        patched.setattr(top, "frame", next_frame)
        with pytest.raises(KeyboardInterrupt):
            top._live(client, next_frame(client), 0.0)
    assert len(drawn) == 2 and drawn[0] == "" and drawn[1].endswith("no answer")


LIVE = """
import sys
from tests.cli.test_top import Coordinator
from tests.terminal.test_watch import JOB
from millrace.cli import app
from millrace.client import Client

coordinator = Coordinator(JOB)
for name in ("jobs", "metrics", "fleet"):
    setattr(Client, name, lambda self, *a, _name=name, **k: getattr(coordinator, _name)(*a, **k))
app(["top", "--every", "0.2"])
"""


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
    root = Path(__file__).resolve().parents[2]
    with_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    argv = [sys.executable, "-c", LIVE]
    watching = subprocess.Popen(argv, stdout=theirs, env=environment, cwd=root, preexec_fn=with_interrupts)
    os.close(theirs)
    told, deadline, stopped = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            told += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not stopped and told.count(b"12/60") >= 2:  # it was drawn again
            watching.send_signal(signal.SIGINT)
            stopped = True
    os.close(ours)
    assert watching.wait(60) == 0
    text = told.decode()
    assert text.index("\x1b[?1049h") < text.index("12/60")  # drawn on the second screen
    assert text.rindex("\x1b[?1049l") > text.rindex("12/60") and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "Traceback" not in text
