"""Opens the prompts that a job names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.data.prompt_files import open_files
from millrace.data.prompt_source import PromptSource
from millrace.errors import refused


def open_source(
    files: Sequence[str | Path] = (),
    procedural: str | None = None,
    procedural_options: Mapping[str, Any] | None = None,
    *,
    field: str = "data",
) -> PromptSource:
    """Opens `files`, or `reasoning_gym:<task>` with its options (`size`, `seed` and those of the task).

    `field` is the section of the job spec that errors name. Raises InvalidJob for files that are missing, empty or
    without verl's columns, and for a task or options that do not exist.
    """
    if bool(files) == bool(procedural):
        reason = "both files and a procedural source are given" if files else "neither files nor a source is given"
        raise refused(f"{field}.files", [str(file) for file in files], reason, "give one of the two.")
    if procedural:
        from millrace.data.procedural import ReasoningGym

        return ReasoningGym(procedural, procedural_options or {}, field)
    return open_files([str(file) for file in files], f"{field}.files")
