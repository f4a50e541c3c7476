"""`millrace validate`: everything about a job spec that this machine can tell, without a coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.output import AsJson, people, print_json


def validate(
    spec: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec.", show_default=False)],
    fields_only: Annotated[
        bool, typer.Option("--fields-only", help="Do not look at the files that the spec names.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a job spec: its fields, and the model, data and reward that it names.

    The files are looked for on this machine; use --fields-only where the job will run elsewhere. Status 1 and every
    mistake with its fix if the spec is not valid.
    """
    from millrace.spec import load
    from millrace.spec.checking import submission

    checked = load(spec)
    if not fields_only:
        submission.check(checked.model_dump(mode="json"))
    if as_json:
        return print_json(checked)
    looked = "its fields fit together" if fields_only else "its fields fit together; model, data and reward are usable"
    people().print(f"{spec}: {looked}.", markup=False)
