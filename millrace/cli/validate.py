"""`millrace validate`: checks a job spec on this machine, without a coordinator."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.cli.output import AsJson, people, print_json
from millrace.cli.settings import Settings, changes_of

WORTH_SHOWING = 10_000
"""Rows from which on a terminal shows how far the reading is."""


def validate(
    spec: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, YAML or JSON.", show_default=False)],
    fields_only: Annotated[
        bool, typer.Option("--fields-only", help="Do not check the files that the spec names.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check a job spec: its fields, and the model, data and reward that it names.

    Every row is read, prompts are made into tokens, and the reward function is called for a few rows, in the process in
    which a replica would call it. The files have to be on this machine; use --fields-only if the job will run on
    another one. If the spec is not valid, the command prints every mistake with its line and fix, and ends with
    status 1.
    """
    from millrace import hub
    from millrace.spec import parse
    from millrace.spec.checking import submission, thorough
    from millrace.spec.document import Document

    document, notes = Document.of_file(spec), []
    document.change(changes_of(settings))
    with document.lines():
        checked = parse(document.tree)
        if not fields_only:
            pinned = submission.check(checked.model_dump(mode="json"))
            notes = thorough.look(hub.local(pinned, data=True), _progress)
    if as_json:
        return print_json(checked)
    for note in notes:
        people().print(note, markup=False)
    checked_parts = "the fields are valid" if fields_only else "the fields are valid; model, data and reward are usable"
    people().print(f"{spec}: {checked_parts}.", markup=False)


def _progress(things: Iterable[Any], what: str, count: int) -> Iterable[Any]:
    """Passes `things` on, with a bar on a terminal where there are many."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = count < WORTH_SHOWING or not console.is_terminal
    return track(things, what, total=count, console=console, transient=True, disable=hidden)
