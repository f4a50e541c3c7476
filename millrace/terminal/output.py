"""What the command prints: tables for people, JSON for programs, errors with their fix."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
import typer.core
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

from millrace.client import Client
from millrace.errors import InvalidJob, MillraceError
from millrace.rest import JobSummary, LedgerView, MemberView, WarningView
from millrace.rest.coverage import covered

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MILLRACE_URL",
        help="Address of the coordinator; without it, that of the local stack.",
        metavar="URL",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]

STATE_STYLE = {
    "running": "cyan",
    **dict.fromkeys(("queued", "starting", "paused", "pausing"), "yellow"),
    **dict.fromkeys(("succeeded", "serving"), "green"),
    **dict.fromkeys(("cancelling", "cancelled", "failed", "lost"), "red"),
}
"""Colours of the states of jobs and members; others have none."""

JSON_REQUESTED = "millrace.json"
"""Key in the context's `meta`: whether the command line has --json."""

GB = 1e9
USAGE_HEADINGS = (">CACHE", ">GPU", ">GPU GB", ">HOST GB")
"""Columns of `usage_cells`."""


class ErrorReporting(typer.core.TyperGroup):
    """Prints a MillraceError of any command on standard error and ends with status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[JSON_REQUESTED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MillraceError as error:
            print_error(error, ctx.meta[JSON_REQUESTED])
            raise typer.Exit(1) from error


def print_error(error: MillraceError, as_json: bool = False) -> None:
    """Prints what happened and the fix on standard error."""
    if as_json:
        document: dict[str, Any] = {"error": type(error).__name__, "what": error.what, "fix": error.fix}
        if isinstance(error, InvalidJob):
            document["mistakes"] = [asdict(mistake) for mistake in error.mistakes]
        print(json.dumps(document), file=sys.stderr)
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(error.what, style="red", markup=False)
    if error.fix:
        console.print(f"Fix: {error.fix}", markup=False)


def people() -> Console:
    """Standard output for people. Without a terminal it has no colours, and lines are not broken."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=1000, soft_wrap=True)


def connect(url: str | None) -> Client:
    """A client for a single question. It reports soon that no coordinator runs."""
    return Client(url, patience_s=2.0)


def print_json(value: BaseModel | Iterable[BaseModel] | Mapping[str, Any]) -> None:
    if isinstance(value, BaseModel):
        print(value.model_dump_json())
    elif isinstance(value, Mapping):
        print(json.dumps(value))
    else:
        print(json.dumps([one.model_dump(mode="json") for one in value]))


def table(*columns: str) -> Table:
    """A table without borders. A column whose name begins with > is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return made


class FittedTable:
    """A table that leaves out columns if the terminal is too narrow for all, instead of cutting each."""

    def __init__(self, *columns: str, spare: Sequence[str]) -> None:
        """`columns` as those of `table`; `spare` are headings of some, the first of which is left out first."""
        self._columns = columns
        self._spare = spare
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=sys.maxsize)
        for count in range(len(self._spare) + 1):
            made = self._without(self._spare[:count])
            if Measurement.get(console, unlimited, made).maximum <= options.max_width:
                break
        yield made

    def _without(self, headings: Sequence[str]) -> Table:
        kept = [n for n, column in enumerate(self._columns) if column.removeprefix(">") not in headings]
        made = table(*(self._columns[n] for n in kept))
        for cells in self._rows:
            made.add_row(*(cells[n] for n in kept))
        return made


def styled(state: str) -> str:
    return f"[{STATE_STYLE.get(state, 'default')}]{state}[/]"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def held_out(job: JobSummary, coverage: bool = False) -> str:
    """`0.100 → 0.950`; only the first one before there is another. A score that is not of every held-out prompt says
    so: `0.420 (107 of 256)`. With `coverage` all say so."""
    before = covered(number(job.evaluation_before), job.evaluation_before_coverage, coverage)
    if job.evaluation_step is None and job.evaluation_last is None:
        return before
    return f"{before} → {covered(number(job.evaluation_last), job.evaluation_last_coverage, coverage)}"


def warning_line(warning: WarningView) -> str:
    """`after step 12: response_length/clip_ratio is 1 …`."""
    return f"after step {warning.step}: {warning.message}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def ledger_line(ledger: LedgerView) -> str:
    """`512 issued = 0 queued + 4 leased + 8 generated + 496 trained + 4 dropped (overlong 4)`."""
    states = ("queued", "leased", "generated", "trained", "dropped")
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(ledger.reasons.items()))
    counts = f"{ledger.issued} issued = " + " + ".join(f"{getattr(ledger, state)} {state}" for state in states)
    return f"{counts} ({reasons})" if reasons else counts


def usage_cells(member: MemberView) -> tuple[str, str, str, str]:
    """Part of the engine's cache that is in use; mean part of the time in which its GPUs run kernels; memory in use on
    these GPUs, of what they have; memory of its processes and of all processes on its hosts, of what these have. `–`
    if a figure is not known."""
    cache = "–" if member.cache_used is None else f"{member.cache_used:.0%}"
    shares = [gpu.busy for gpu in member.gpus if gpu.busy is not None]
    busy = f"{sum(shares) / len(shares):.0%}" if shares else "–"
    gpus = _of([gpu.used_bytes for gpu in member.gpus], [gpu.size_bytes for gpu in member.gpus])
    own = sum(host.process_bytes for host in member.hosts)
    hosts = _of([host.used_bytes for host in member.hosts], [host.size_bytes for host in member.hosts])
    return cache, busy, gpus, f"{own / GB:.1f} in {hosts}" if member.hosts else "–"


def _of(used: list[int], sizes: list[int]) -> str:
    return f"{sum(used) / GB:.1f}/{sum(sizes) / GB:.0f}" if sizes else "–"
