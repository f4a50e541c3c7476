"""`millrace top`: jobs and fleet of a coordinator, live in the terminal."""

import contextlib
import sys
import time
from collections import Counter
from typing import Annotated

import typer
from pydantic import BaseModel, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from millrace.client import Client
from millrace.errors import MillraceError
from millrace.rest import FleetView, JobState, JobSummary, MemberKind, MemberState, MemberView, StepMetrics
from millrace.telemetry.metrics.step.performance import TOTAL_TOKENS
from millrace.telemetry.metrics.step.timing import STEP_SECONDS
from millrace.terminal.output import (
    USAGE_HEADINGS,
    AsJson,
    FittedTable,
    Url,
    connect,
    duration,
    held_out,
    number,
    people,
    print_json,
    styled,
    usage_cells,
    warning_line,
)

ACTIVE = (JobState.RUNNING, JobState.STARTING, JobState.PAUSED, JobState.QUEUED)
"""States of the jobs that are shown, in this order."""
MOST_JOBS = 20
"""Jobs of one state that are asked for."""
ENDED_JOBS = 3
"""Jobs that ended, the newest of which are shown below the others."""
STEPS = 10
"""Steps over which a job's pace is averaged."""
EXTRA_TIMES = ("timing_s/testing", "timing_s/save_checkpoint")
"""Time between two steps that is not part of either."""
MOST_MEMBERS = 500
"""Members that are listed if the height of a terminal does not limit them."""


class Pace(BaseModel):
    """How fast a job trains, as the mean of its last steps."""

    step_s: float
    """Seconds of a step, with the evaluations and the waits for checkpoints between steps."""
    tokens_per_s: float
    """Tokens that the trainer gets through in a second, waiting included."""
    left_s: float | None
    """Seconds until the last step at this pace; None if the number of steps is not known."""


class Frame(BaseModel):
    """What is shown at one time."""

    url: str = Field(exclude=True)
    time_s: float
    """Unix time."""
    jobs: list[JobSummary]
    paces: dict[str, Pace]
    """The pace of each job that has trained a step and is not over, by the job's id."""
    fleet: FleetView


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the picture of now and end.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between two pictures.", min=0.2, max=3600.0, show_default=True)
    ] = 1.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show jobs and fleet live: steps, rewards, pace, time left, what waits and why. Ctrl-C ends it; jobs continue.

    Where standard output is not a terminal, one picture is printed, as with --once and --json.
    """
    with connect(url) as client:
        first = frame(client)
        if as_json:
            return print_json(first)
        if once or not sys.stdout.isatty():
            return people().print(picture(first, MOST_MEMBERS))
        with contextlib.suppress(KeyboardInterrupt):
            _live(client, first, every)


def frame(client: Client) -> Frame:
    """Asks the coordinator. Raises MillraceError."""
    now = time.time()
    found_jobs = {job.id: job for state in ACTIVE for job in client.jobs(state, limit=MOST_JOBS)}
    jobs = list(found_jobs.values())  # one that changed its state meanwhile was found twice
    ended = [job for job in client.jobs(limit=MOST_JOBS) if job.state not in ACTIVE and job.id not in found_jobs]
    trained = [job for job in jobs if job.step > 0 and job.state is not JobState.QUEUED]
    found = {job.id: pace(job, client.metrics(job.id, after_step=max(0, job.step - STEPS))) for job in trained}
    paces = {job: known for job, known in found.items() if known is not None}
    shown = jobs + ended[:ENDED_JOBS]
    return Frame(url=client.url, time_s=now, jobs=shown, paces=paces, fleet=client.fleet())


def pace(job: JobSummary, rows: list[StepMetrics]) -> Pace | None:
    """The pace of the job's last steps; None if no step has its duration yet."""
    timed = [row.values for row in rows if STEP_SECONDS in row.values]
    if not timed:
        return None
    inside_s = sum(values[STEP_SECONDS] for values in timed)
    between_s = sum(values.get(name, 0.0) for values in timed for name in EXTRA_TIMES)
    tokens = sum(values.get(TOTAL_TOKENS, 0.0) for values in timed)
    step_s = (inside_s + between_s) / len(timed)
    left_s = step_s * max(0, job.steps - job.step) if job.steps else None
    return Pace(step_s=step_s, tokens_per_s=tokens / inside_s if inside_s > 0 else 0.0, left_s=left_s)


def _live(client: Client, first: Frame, every_s: float) -> None:
    """Shows pictures on the terminal's second screen, so that nothing stays of them, until Ctrl-C. While the
    coordinator does not answer, the last picture stays with a line that says so."""
    console = Console(highlight=False)
    shown, trouble = first, ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(shown, _room(console, shown), trouble), refresh=True)
            time.sleep(every_s)
            try:
                shown, trouble = frame(client), ""
            except MillraceError as error:
                trouble = f"{time.strftime('%H:%M:%S')} {error.what}"


def _room(console: Console, shown: Frame) -> int:
    """Members that fit on the terminal below the jobs."""
    return max(3, console.height - len(shown.jobs) - len(_remarks(shown)) - 9)


def picture(shown: Frame, members: int, trouble: str = "") -> RenderableType:
    """The frame for people, with at most `members` members. `trouble`: why there is no newer frame."""
    at = time.strftime("%H:%M:%S", time.localtime(shown.time_s))
    parts: list[RenderableType] = [Text.from_markup(f"[bold]millrace top[/]  {escape(shown.url)}  {at}")]
    if trouble:
        parts.append(Text(trouble, style="red"))
    parts += ["", jobs_table(shown) if shown.jobs else "There are no jobs. Submit one with `millrace submit job.yaml`."]
    parts += _remarks(shown)
    listed = in_order(shown.fleet)
    parts += ["", fleet_line(shown.fleet)]
    if listed:
        parts.append(members_table(listed[:members]))
    if len(listed) > members:
        parts.append(Text(f"and {len(listed) - members} more: millrace fleet", style="dim"))
    return Group(*parts)


def jobs_table(shown: Frame) -> FittedTable:
    rows = FittedTable(
        *("JOB", "NAME", "STATE", ">STEP", ">VERSION", ">REWARD", ">HELD-OUT"),
        *(">STEP S", ">TOKENS/S", ">RAN", ">LEFT"),
        spare=("VERSION", "RAN", "TOKENS/S", "STEP S", "HELD-OUT"),
    )
    for job in shown.jobs:
        now = shown.paces.get(job.id)
        speed = (number(now.step_s, 1), f"{now.tokens_per_s:,.0f}") if now is not None else ("–", "–")
        left = duration(now.left_s) if now is not None and now.left_s is not None else "–"
        ran = duration(job.ran_s) if job.ran_s else "–"
        figures = (f"{job.step}/{job.steps_shown}", str(job.version), number(job.reward), held_out(job))
        rows.add_row(job.id, escape(job.name), styled(job.status), *figures, *speed, ran, left)
    return rows


def _remarks(shown: Frame) -> list[RenderableType]:
    """What jobs wait for, their warnings that last, why the last one failed, and members that have troubles."""
    lines = [(f"{job.id} waits: {job.waiting.message}", "yellow") for job in shown.jobs if job.waiting]
    for job in shown.jobs:
        lines += [(f"{job.id} warning {warning_line(w)}", "yellow") for w in job.warnings if not w.over]
        lines += [(f"{job.id} failed: {job.failure}", "red")] if job.failure else []
    for member in (*shown.fleet.trainers, *shown.fleet.replicas):
        if member.trouble:
            lines.append((f"{member.id} could not be configured: {member.trouble}", "red"))
        if member.gone and member.state is MemberState.LOST:
            lines.append((f"{member.id}: {member.gone}", "yellow"))
    return [Text(line, style=style, no_wrap=True, overflow="ellipsis") for line, style in lines[:8]]


def fleet_line(fleet: FleetView) -> Text:
    """`epoch 4 · trainers: 1 serving · replicas: 3 serving, 1 lost · 1,234 tokens/s, 12 leases, ...`."""
    if not fleet.trainers and not fleet.replicas:
        return Text("No trainers or replicas are connected. Start a local fleet with `millrace up`.")

    def counted(members: list[MemberView]) -> str:
        counts = Counter(str(member.state) for member in members)
        return ", ".join(f"{count} {state}" for state, count in counts.most_common()) or "none"

    running, waiting, free = (sum(getattr(m, what) for m in fleet.replicas) for what in ("running", "waiting", "free"))
    tokens, leases = sum(m.tokens_per_s for m in fleet.replicas), sum(m.leases for m in fleet.replicas)
    members = f"epoch {fleet.epoch}  trainers: {counted(fleet.trainers)}  replicas: {counted(fleet.replicas)}"
    work = (
        f"{tokens:,.0f} tokens/s generated, {leases} leases, {running} samples running, {waiting} waiting, {free} free"
    )
    return Text(f"{members}\n{work}")


def in_order(fleet: FleetView) -> list[MemberView]:
    """Trainers, then the replicas that do not serve, then the others."""
    return [*fleet.trainers, *sorted(fleet.replicas, key=lambda m: m.state is MemberState.SERVING)]


def members_table(members: list[MemberView]) -> FittedTable:
    rows = FittedTable(
        *("MEMBER", "STATE", ">VERSION", ">RUNNING", ">WAITING", ">FREE", ">LEASES", ">TOKENS/S", ">SILENT S"),
        *USAGE_HEADINGS,
        *("ENGINE", "HOST", "DEVICE"),
        spare=(
            "ENGINE",
            "HOST GB",
            "FREE",
            "GPU GB",
            "SILENT S",
            "DEVICE",
            "CACHE",
            "LEASES",
            "GPU",
            "WAITING",
            "HOST",
        ),
    )
    for m in members:
        counts = (m.running, m.waiting, m.free, m.leases) if m.kind is MemberKind.ROLLOUT else ("", "", "", "")
        speed = (f"{m.tokens_per_s:,.0f}", f"{m.silent_s:.1f}")
        engine = f"{m.engine} {m.engine_release} ×{m.world_size}"
        where = (escape(engine), escape(m.host), escape(m.device))
        rows.add_row(escape(m.id), styled(m.state), str(m.version), *map(str, counts), *speed, *usage_cells(m), *where)
    return rows
