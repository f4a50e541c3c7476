"""`millrace watch` and `submit --watch`: one job, live, until it ends. Ctrl-C detaches."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from millrace.cli.output import AsJson, JobName, Url, job_id, number, people, print_json, styled, table
from millrace.client import ENDED, Client
from millrace.events import Event, EventKind
from millrace.rest import FleetView, JobState, JobView, LedgerView, StepMetrics

LOOK_S = 0.4
SHOWN_EVENTS = 6
SHOWN_STEPS = 8
ROUTINE = (EventKind.STEP_DONE, EventKind.PUBLICATION_DONE)
"""Events that the table tells already."""

WHOLE = "timing_s/update_weights"
"""A step's row has it once the step's publication is over."""


@dataclass
class Picture:
    """What is known about the watched job."""

    job: JobView
    ledger: LedgerView
    fleet: FleetView
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    """The last ones by number; the newest row grows until its publication is over."""
    events: list[Event] = field(default_factory=list)
    """The last ones."""
    news: list[Event] = field(default_factory=list)
    """All that came since the picture before."""


def watch(job: JobName = "last", url: Url = None, as_json: AsJson = False) -> None:
    """Show a job live until it ends. Ctrl-C detaches, the job goes on. Status 1 if it does not succeed."""
    with Client(url) as client:
        raise typer.Exit(follow(client, job_id(client, job), as_json))


def follow(client: Client, job: str, as_json: bool = False) -> int:
    """Shows the job until it ends, or until Ctrl-C; the exit status."""
    try:
        final = show_live(client, job, as_json)
    except KeyboardInterrupt:
        told = f"\ndetached; {job} goes on. `millrace watch {job}` shows it again, `millrace cancel {job}` ends it."
        print(told, file=sys.stderr if as_json else sys.stdout)
        return 0
    return 0 if final.state is JobState.SUCCEEDED else 1


def show_live(client: Client, job: str, as_json: bool = False) -> JobView:
    """Shows the job until it ends: a live table at a terminal, a line a step without one, or its events as JSON."""
    if as_json:
        return _print_events(client, job)
    final = _live(client, job) if sys.stdout.isatty() else _lines(client, job)
    _say_end(final)
    return final


def _print_events(client: Client, job: str) -> JobView:
    for event in client.events(job):
        print_json(event)
        sys.stdout.flush()
    return client.job(job)


def pictures(client: Client, job: str) -> Iterator[Picture]:
    """The job's picture, again and again, the last one after its end; only what is new is fetched anew."""
    picture = Picture(client.job(job), client.ledger(job), client.fleet())
    last_step, last_event = 0, ""
    while True:
        picture.job = client.job(job)  # first, so that what follows is at least as new as the state
        last_step = min(last_step, picture.job.step)  # a job that went back trains its later steps again
        picture.steps = {step: row for step, row in picture.steps.items() if step <= last_step}
        for row in client.metrics(job, after_step=max(0, last_step - 1)):
            picture.steps[row.step] = row
            last_step = row.step
        picture.steps = dict(sorted(picture.steps.items())[-SHOWN_STEPS:])
        picture.news = list(client.events(job, after=last_event, follow=False))
        picture.events = [*picture.events, *picture.news][-SHOWN_EVENTS:]
        last_event = picture.events[-1].id if picture.events else ""
        picture.ledger, picture.fleet = client.ledger(job), client.fleet()
        yield picture
        if picture.job.state in ENDED:
            return
        time.sleep(LOOK_S)


def _live(client: Client, job: str) -> JobView:
    console = Console(highlight=False)
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("step {task.completed:.0f}/{task.fields[steps]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    bar = progress.add_task(job, total=None, steps="?")
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        for picture in pictures(client, job):
            _move(progress, bar, picture.job)
            live.update(Group(progress, *panels(picture)))
    return picture.job


def _move(progress: Progress, bar: TaskID, job: JobView) -> None:
    progress.update(bar, description=escape(job.name), completed=job.step, total=job.steps or None)
    progress.update(bar, steps=job.steps or "?")


def panels(picture: Picture) -> list[Table | str]:
    """What stands under the progress bar."""
    job, ledger = picture.job, picture.ledger
    now = (
        f"{styled(job.state)}  version {job.version}  reward {number(job.reward)}  "
        f"held-out {number(job.evaluation_before)} → {number(job.evaluation_last)}"
    )
    ledger_row = table(">ISSUED", ">QUEUED", ">LEASED", ">GENERATED", ">TRAINED", ">DROPPED")
    counts = (ledger.issued, ledger.queued, ledger.leased, ledger.generated, ledger.trained, ledger.dropped)
    ledger_row.add_row(*map(str, counts))
    members = table("MEMBER", "STATE", ">VERSION", ">RUNNING", ">LEASES", ">TOKENS/S")
    for m in (*picture.fleet.trainers, *picture.fleet.replicas):
        members.add_row(m.id, styled(m.state), str(m.version), str(m.running), str(m.leases), f"{m.tokens_per_s:.0f}")
    return [now, ledger_row, members, steps_table(list(picture.steps.values())), events_table(picture.events)]


COLUMNS = {
    ">REWARD": ("critic/rewards/mean", "{:.3f}"),
    ">LOSS": ("actor/pg_loss", "{:.4f}"),
    ">GRAD": ("actor/grad_norm", "{:.3f}"),
    ">KL": ("actor/ppo_kl", "{:.5f}"),
    ">LENGTH": ("response_length/mean", "{:.1f}"),
    ">STEP S": ("timing_s/step", "{:.2f}"),
    ">GENERATE S": ("timing_s/gen", "{:.2f}"),
    ">UPDATE S": ("timing_s/update_actor", "{:.2f}"),
    ">PUBLISH S": ("timing_s/update_weights", "{:.2f}"),
    ">PAUSE S": ("publication/pause_s", "{:.3f}"),
}
"""A column is shown where the job's step metrics have it."""


def steps_table(steps: list[StepMetrics]) -> Table:
    known = {title: shape for title, shape in COLUMNS.items() if any(shape[0] in row.values for row in steps)}
    rows = table(">STEP", *known)
    for row in steps:
        cells = (shape.format(row.values[name]) if name in row.values else "" for name, shape in known.values())
        rows.add_row(str(row.step), *cells)
    return rows


def events_table(events: list[Event]) -> Table:
    rows = Table.grid(padding=(0, 1))
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        rows.add_row(f"[dim]{at}[/]", event.kind, escape(event.message))
    return rows


def _lines(client: Client, job: str) -> JobView:
    """For a pipe or a log: a line a step and a line an event that is not routine."""
    told_step = 0
    for picture in pictures(client, job):
        for event in picture.news:
            if event.kind not in ROUTINE:
                print(f"{event.kind}: {event.message}", flush=True)
        ended, told_step = picture.job.state in ENDED, min(told_step, picture.job.step)
        for row in picture.steps.values():
            if row.step > told_step and (ended or WHOLE in row.values or row.step + 1 in picture.steps):
                print(step_line(row, picture.job), flush=True)
                told_step = row.step
    return picture.job


def step_line(row: StepMetrics, job: JobView) -> str:
    """`step 12/60  reward 0.430  pg_loss ...`: what the table shows, in words."""
    shown = {title: shape for title, shape in COLUMNS.items() if shape[0] in row.values}
    told = (f"{title[1:].lower()} {shape.format(row.values[name])}" for title, (name, shape) in shown.items())
    return "  ".join([f"step {row.step}/{job.steps or '?'}", *told])


def _say_end(job: JobView) -> None:
    console = people()
    console.print(
        f"{job.id} {styled(job.state)} at step {job.step}; held-out reward {number(job.evaluation_before)} → "
        f"{number(job.evaluation_last)}"
    )
    for name, value in (("checkpoint", job.checkpoint), ("report", job.report), ("failure", job.failure)):
        if value:
            with contextlib.suppress(BrokenPipeError):
                console.print(f"{name}: {value}", markup=False)
