"""`millrace report`: a job as one HTML file."""

import os
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.names import JobName, job_id
from millrace.errors import InvalidState, wrong_value
from millrace.terminal.output import AsJson, Url, connect, people, print_json


def report(
    job: JobName = "last",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; without it, JOB.html with the job's id here."),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many of the newest answers to include.", min=0, max=1000)] = 64,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write a job as one HTML file: curves of all metrics, samples, prompts, publications, events and the spec.

    The file needs no network and runs no script, so it can be sent to others and kept. The job may still run.
    """
    from millrace.report.contents import gather
    from millrace.report.page import report_page

    with connect(url) as client:
        contents = gather(client, job_id(client, job), samples)
    path = output if output is not None else Path(f"{contents.job.id}.html")
    written = write(path, report_page(contents))
    if as_json:
        return print_json({"path": str(path.absolute()), "bytes": written})
    people().print(f"{path.absolute()}  {written / 1e6:.1f} MB", markup=False)


def write(path: Path, text: str) -> int:
    """Writes the file, whole or not at all. Returns its size in bytes. Raises InvalidState."""
    data = text.encode()
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        wrong = wrong_value("--output", str(path), error.strerror or str(error), "name a file in a folder of yours.")
        raise InvalidState(wrong.what, wrong.fix) from error
    return len(data)
