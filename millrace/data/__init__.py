"""Prompt sources: Parquet and JSON in the columns of verl, TRL, OpenAI or one's own, and procedural tasks. No torch.

`open_section` opens what a job names as a `PromptSource`: rows by number, each a `PromptRow`, and an order for every
pass. A file that cannot be used is refused when it is opened (InvalidJob), a bad row when it is read (BadRow). `chat`
turns a row into tokens, `model_folder` checks the files of a model, `row.write_rows` writes a file that `open_source`
reads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from millrace.data.columns.layout import Reading
from millrace.data.columns.messages import Message
from millrace.data.prompt_files import open_files
from millrace.data.prompt_source import Order, PromptSource
from millrace.data.row import PromptRow
from millrace.errors import refused

if TYPE_CHECKING:
    from millrace.spec import JobSpec

__all__ = ["Message", "Order", "PromptRow", "PromptSource", "Reading", "open_section", "open_source"]


def open_section(spec: "JobSpec", section: Literal["data", "evaluation"]) -> PromptSource | None:
    """Opens what a section of a job spec names; None for an evaluation that the job does not have. Raises
    InvalidJob."""
    part, columns = spec.data if section == "data" else spec.evaluation, spec.data.columns
    if part is None:
        return None
    most = None if spec.data.images is None else spec.data.images.max_per_prompt
    reading = Reading(columns if part.columns is None else part.columns, spec.data.prompt_format, most)
    return open_source(part.files, part.procedural, part.procedural_options, reading=reading, field=section)


def open_source(
    files: Sequence[str | Path] = (),
    procedural: str | None = None,
    procedural_options: Mapping[str, Any] | None = None,
    *,
    reading: Reading | None = None,
    field: str = "data",
) -> PromptSource:
    """Opens `files`, or `reasoning_gym:<task>` with its options (`size`, `seed` and those of the task).

    `reading` says which column of files is what. `field` is the section of the job spec that errors name. Raises
    InvalidJob for files that are missing, empty or without the columns of a prompt, and for a task or options that do
    not exist.
    """
    if bool(files) == bool(procedural):
        reason = "both files and a procedural source are given" if files else "neither files nor a source is given"
        raise refused(f"{field}.files", [str(file) for file in files], reason, "give one of the two.")
    if procedural:
        from millrace.data.procedural import ReasoningGym

        return ReasoningGym(procedural, procedural_options or {}, field)
    return open_files([str(file) for file in files], f"{field}.files", reading or Reading())
