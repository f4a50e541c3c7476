"""`millrace logs`: what the services of a local stack wrote, and the newest lines of any member of the fleet."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.names import complete_services, not_found
from millrace.errors import InvalidRequest, NotFound
from millrace.local.service_log import GrowingFile, readable, sender, start_of_last_lines
from millrace.terminal.output import Url, connect

LOOK_S = 0.2
"""How often the files are looked at for new lines."""
MOST_LINES = 1_000_000
MEMBER_ID = r"[\w-]+-[0-9a-f]{8}"
COORDINATOR = "coordinator"
MOST_KEPT = 200
"""Lines that a service keeps in memory."""


def logs(
    service: Annotated[
        str | None,
        typer.Argument(
            metavar="[SERVICE|MEMBER]",
            help="coordinator, trainer, rollout-0, …; without it, all of them. Or the id of a member on any host.",
            autocompletion=complete_services,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/ ", help="Wait for new lines.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the last lines to print of each.", min=0, max=MOST_LINES)
    ] = 50,
    state: Annotated[Path, typer.Option(help="Folder of the stack, as `millrace up --state` has it.")] = Path("state"),
    url: Url = None,
) -> None:
    """Print the logs of the local stack that `millrace up` started, also after it has ended; or the newest lines of a
    member.

    The logs are the files in STATE/logs. A member, named by its id as `millrace fleet` lists it, is asked through the
    coordinator, on whichever host it runs, and has its last 200 lines; so has `coordinator` if there is no file.
    """
    folder = state.resolve() / "logs"
    files = _files(folder, service)
    if not files and service is not None and (service == COORDINATOR or re.fullmatch(MEMBER_ID, service)):
        return _of_member(service, url, lines, follow)
    if not files:
        raise _nothing(folder, service)
    opened = {path: GrowingFile(path, start_of_last_lines(path, lines)) for path in files}
    for path, file in opened.items():
        _print_lines(path, file, service)
        if not follow and file.unfinished:
            _print_line(path.stem, file.unfinished, service)
    try:
        while follow:
            time.sleep(LOOK_S)
            for path in _files(folder, service):  # a service that starts later has a file later
                _print_lines(path, opened.setdefault(path, GrowingFile(path)), service)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _of_member(member: str, url: str | None, lines: int, follow: bool) -> None:
    """Prints the newest lines of a member, at most as many as it keeps."""
    if follow:
        what = f"--follow: {member}: a member gives the lines that it has kept, not those to come."
        raise InvalidRequest(what, "leave out --follow, or name a service of the local stack.")
    with connect(url) as client:
        kept = client.log(member, min(lines, MOST_KEPT)).lines if lines else []
    for line in kept:
        first, _, rest = line.details.partition("\n")
        typer.echo(" ".join(part for part in (line.time, line.level.upper(), line.message, first) if part))
        if rest:
            typer.echo(rest)


def _files(folder: Path, service: str | None) -> list[Path]:
    return [path for path in sorted(folder.glob("*.log")) if service in (None, path.stem)]


def _nothing(folder: Path, service: str | None) -> NotFound:
    if known := [path.stem for path in _files(folder, None)]:
        return not_found("service", service or "", known, f"choose from {', '.join(known)}.")
    fix = "name the folder of a stack with --state, as you named it for `millrace up`, or start one."
    return NotFound(f"there are no logs in {folder}.", fix)


def _print_lines(path: Path, file: GrowingFile, service: str | None) -> None:
    for line in file.new_lines():
        _print_line(path.stem, line, service)


def _print_line(name: str, line: str, service: str | None) -> None:
    """Prints a line, with the name of its service if the logs of several are printed."""
    for part in readable(line, with_time=True).splitlines() or [""]:
        print(part if service else f"{sender(name, coloured=sys.stdout.isatty())} {part}", flush=True)
