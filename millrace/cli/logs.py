"""`millrace logs`: what the services of a local stack wrote."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import completion
from millrace.cli.names import not_found
from millrace.errors import NotFound
from millrace.local.service_log import GrowingFile, readable, sender, start_of_last_lines

LOOK_S = 0.2
"""How often the files are looked at for new lines."""
MOST_LINES = 1_000_000


def logs(
    service: Annotated[
        str | None,
        typer.Argument(
            metavar="[SERVICE]",
            help="coordinator, trainer, rollout-0, …; without it, all of them.",
            autocompletion=completion.services,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/ ", help="Wait for new lines.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the last lines to print of each.", min=0, max=MOST_LINES)
    ] = 50,
    state: Annotated[Path, typer.Option(help="Folder of the stack, as `millrace up --state` has it.")] = Path("state"),
) -> None:
    """Print the logs of the local stack that `millrace up` started, also after it has ended.

    The logs are the files in STATE/logs. Services of other hosts write to their own standard error.
    """
    folder = state.resolve() / "logs"
    opened = {path: GrowingFile(path, start_of_last_lines(path, lines)) for path in _files(folder, service)}
    if not opened:
        raise _nothing(folder, service)
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
