"""`millrace validate`: checks a job spec on this machine, without a coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.output import AsJson, people, print_json


def validate(
    spec: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, YAML or JSON.", show_default=False)],
    fields_only: Annotated[
        bool, typer.Option("--fields-only", help="Do not check the files that the spec names.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a job spec: its fields, and the model, data and reward that it names.

    The files have to be on this machine; use --fields-only if the job will run on another one. If the spec is not
    valid, the command prints every mistake with its fix and ends with status 1.
    """
    from millrace.spec import load
    from millrace.spec.checking import submission

    checked = load(spec)
    if not fields_only:
        submission.check(checked.model_dump(mode="json"))
    if as_json:
        return print_json(checked)
    checked_parts = "the fields are valid" if fields_only else "the fields are valid; model, data and reward are usable"
    people().print(f"{spec}: {checked_parts}.", markup=False)
