"""How the command speaks: tables for people, JSON for programs, errors with their fix and status 1."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
import typer.core
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from millrace.client import Client
from millrace.errors import InvalidState, MillraceError, NotFound

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="MILLRACE_URL", help="The coordinator; the local stack's unless given.", metavar="URL"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id, the beginning of one, or `last` for the newest job.")
]

STATE_STYLE = {
    "queued": "yellow",
    "starting": "yellow",
    "running": "cyan",
    "paused": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "red",
    "serving": "green",
    "ready": "green",
    "lost": "red",
}


JSON_ASKED = "millrace.json"


class TellsErrors(typer.core.TyperGroup):
    """Turns a MillraceError of any command into its text on standard error and status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[JSON_ASKED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MillraceError as error:
            tell(error, ctx.meta[JSON_ASKED])
            raise typer.Exit(1) from error


COMMANDS = {"GET /v1/jobs lists": "`millrace jobs` lists", "GET /v1/fleet lists": "`millrace fleet` lists"}
"""What the coordinator's fixes name, and the command that says the same."""


def tell(error: MillraceError, as_json: bool = False) -> None:
    """On standard error: what happened and the fix."""
    fix = error.fix
    for call, command in COMMANDS.items():
        fix = fix.replace(call, command)
    if as_json:
        print(json.dumps({"error": type(error).__name__, "what": error.what, "fix": fix}), file=sys.stderr)
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(error.what, style="red", markup=False)
    if fix:
        console.print(f"Fix: {fix}", markup=False)


def people() -> Console:
    """Standard output for people. Without a terminal: no colours, and lines as long as they are."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=1000, soft_wrap=True)


def connect(url: str | None) -> Client:
    """For one question: a coordinator that does not run is told soon."""
    return Client(url, patience_s=2.0)


def print_json(value: BaseModel | Iterable[BaseModel] | Mapping[str, Any]) -> None:
    if isinstance(value, BaseModel):
        print(value.model_dump_json())
    elif isinstance(value, Mapping):
        print(json.dumps(value))
    else:
        print(json.dumps([one.model_dump(mode="json") for one in value]))


def table(*columns: str) -> Table:
    """A table without frames; a column whose name begins with > holds numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return made


def styled(state: str) -> str:
    return f"[{STATE_STYLE.get(state, 'default')}]{state}[/]"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def job_id(client: Client, given: str) -> str:
    """The id that `given` stands for. Raises NotFound, and InvalidState where it could be several."""
    if given.startswith("job-") and len(given) == len("job-") + 12:
        return given
    jobs = sorted(client.jobs(), key=lambda job: job.created_s)
    if given == "last" and jobs:
        return jobs[-1].id
    matching = [j.id for j in jobs if j.id.startswith((given, f"job-{given}")) or j.name == given]
    if not matching:
        raise NotFound(f"no job is called {given!r} at {client.url}.", "`millrace jobs` lists them.")
    if len(matching) > 1:
        raise InvalidState(f"{given!r} could be {', '.join(matching)}.", "give more of the id.")
    return matching[0]
