"""One job, live, until it ends: `millrace watch`, `submit --watch` and the demo. Ctrl-C detaches."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from millrace.client import Client
from millrace.events import Event, EventKind
from millrace.rest import ENDED, FleetView, JobState, JobView, LedgerView, StepMetrics
from millrace.terminal.output import held_out, number, people, print_json, styled, table, warning_line

POLL_S = 0.4
SHOWN_EVENTS = 6
SHOWN_STEPS = 8
ROUTINE = (EventKind.STEP_DONE, EventKind.PUBLICATION_DONE)
"""Kinds of events that the table of steps shows already."""

LAST_METRIC = "timing_s/update_weights"
"""The metric that completes a step's row: it is added when the step's publication is over."""


@dataclass
class Snapshot:
    """What is known about the watched job at one time."""

    job: JobView
    ledger: LedgerView
    fleet: FleetView
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    """The last SHOWN_STEPS rows by step; the newest row grows until its publication is over."""
    events: list[Event] = field(default_factory=list)
    """The last SHOWN_EVENTS events."""
    new_events: list[Event] = field(default_factory=list)
    """All events since the snapshot before."""


def follow(client: Client, job: str, as_json: bool = False) -> int:
    """Shows the job until it ends, or until Ctrl-C. Returns the exit status."""
    try:
        final = show_live(client, job, as_json)
    except KeyboardInterrupt:
        text = f"\ndetached; {job} continues. Show it again: `millrace watch {job}`. End it: `millrace cancel {job}`."
        print(text, file=sys.stderr if as_json else sys.stdout)
        return 0
    return 0 if final.state is JobState.SUCCEEDED else 1


def show_live(client: Client, job: str, as_json: bool = False) -> JobView:
    """Shows the job until it ends: a live table at a terminal, otherwise one line per step, or its events as JSON."""
    if as_json:
        return _print_events(client, job)
    final = _live(client, job) if sys.stdout.isatty() else _lines(client, job)
    _print_end(final)
    return final


def _print_events(client: Client, job: str) -> JobView:
    for event in client.events(job):
        print_json(event)
        sys.stdout.flush()
    return client.job(job)


def snapshots(client: Client, job: str) -> Iterator[Snapshot]:
    """Yields the same snapshot, updated, every POLL_S seconds, the last time after the job has ended. Only new rows and
    events are fetched."""
    snapshot = Snapshot(client.job(job), client.ledger(job), client.fleet())
    last_step, last_event = 0, ""
    while True:
        snapshot.job = client.job(job)  # first, so that what follows is at least as new as the state
        last_step = min(last_step, snapshot.job.step)  # a job that went back trains its later steps again
        snapshot.steps = {step: row for step, row in snapshot.steps.items() if step <= last_step}
        for row in client.metrics(job, after_step=max(0, last_step - 1)):
            snapshot.steps[row.step] = row
            last_step = row.step
        snapshot.steps = dict(sorted(snapshot.steps.items())[-SHOWN_STEPS:])
        snapshot.new_events = list(client.events(job, after=last_event, follow=False))
        snapshot.events = [*snapshot.events, *snapshot.new_events][-SHOWN_EVENTS:]
        last_event = snapshot.events[-1].id if snapshot.events else ""
        snapshot.ledger, snapshot.fleet = client.ledger(job), client.fleet()
        yield snapshot
        if snapshot.job.state in ENDED:
            return
        time.sleep(POLL_S)


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
        for snapshot in snapshots(client, job):
            now, name = snapshot.job, escape(snapshot.job.name)
            progress.update(bar, description=name, completed=now.step, total=now.steps or None, steps=now.steps_shown)
            live.update(Group(progress, *panels(snapshot)))
    return snapshot.job


def panels(snapshot: Snapshot) -> list[Table | str]:
    """The tables below the progress bar."""
    job, ledger = snapshot.job, snapshot.ledger
    now = f"{styled(job.status)}  version {job.version}  reward {number(job.reward)}  held-out {held_out(job)}"
    if job.waiting:
        now += f"\n[yellow]waits: {escape(job.waiting.message)}[/]"
    for warning in job.warnings:
        now += f"\n[yellow]warning {escape(warning_line(warning))}[/]"
    ledger_row = table(">ISSUED", ">QUEUED", ">LEASED", ">GENERATED", ">TRAINED", ">DROPPED")
    counts = (ledger.issued, ledger.queued, ledger.leased, ledger.generated, ledger.trained, ledger.dropped)
    ledger_row.add_row(*map(str, counts))
    members = table("MEMBER", "STATE", ">VERSION", ">RUNNING", ">LEASES", ">TOKENS/S")
    for m in (*snapshot.fleet.trainers, *snapshot.fleet.replicas):
        members.add_row(m.id, styled(m.state), str(m.version), str(m.running), str(m.leases), f"{m.tokens_per_s:.0f}")
    return [now, ledger_row, members, steps_table(list(snapshot.steps.values())), events_table(snapshot.events)]


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
"""A column is shown if the job's step metrics have it."""


def steps_table(steps: list[StepMetrics]) -> Table:
    shown = {title: column for title, column in COLUMNS.items() if any(column[0] in row.values for row in steps)}
    rows = table(">STEP", *shown)
    for row in steps:
        cells = (form.format(row.values[name]) if name in row.values else "" for name, form in shown.values())
        rows.add_row(str(row.step), *cells)
    return rows


def events_table(events: list[Event]) -> Table:
    rows = Table.grid(padding=(0, 1))
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        rows.add_row(f"[dim]{at}[/]", event.kind, escape(event.message))
    return rows


def _lines(client: Client, job: str) -> JobView:
    """Prints one line per step, and one per event that is not ROUTINE: for a pipe or a log."""
    printed_step = 0
    for snapshot in snapshots(client, job):
        for event in snapshot.new_events:
            if event.kind not in ROUTINE:
                print(f"{event.kind}: {event.message}", flush=True)
        ended, printed_step = snapshot.job.state in ENDED, min(printed_step, snapshot.job.step)
        for row in snapshot.steps.values():
            if row.step > printed_step and (ended or LAST_METRIC in row.values or row.step + 1 in snapshot.steps):
                print(step_line(row, snapshot.job), flush=True)
                printed_step = row.step
    return snapshot.job


def step_line(row: StepMetrics, job: JobView) -> str:
    """`step 12/60  reward 0.430  loss 0.0312 ...`: a row of the table in one line."""
    shown = {title: column for title, column in COLUMNS.items() if column[0] in row.values}
    values = (f"{title[1:].lower()} {form.format(row.values[name])}" for title, (name, form) in shown.items())
    return "  ".join([f"step {row.step}/{job.steps_shown}", *values])


def _print_end(job: JobView) -> None:
    console = people()
    console.print(f"{job.id} {styled(job.state)} at step {job.step}; held-out {held_out(job)}")
    for name, value in (("checkpoint", job.checkpoint), ("report", job.report), ("failure", job.failure)):
        if value:
            with contextlib.suppress(BrokenPipeError):
                console.print(f"{name}: {value}", markup=False)
