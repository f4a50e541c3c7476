"""From YAML or JSON to a `JobSpec`, with every mistake told as field, value, reason and fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from millrace.errors import InvalidJob
from millrace.spec.job import JobSpec
from millrace.validation.mistakes import numbers_that_are_none, told, unwritable

UNREADABLE = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What PyYAML raises: its own errors, and others where a scalar does not fit its tag."""


def load(path: str | Path) -> JobSpec:
    """Reads a job spec from a YAML or JSON file. Raises InvalidJob."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob(
            f"cannot read the job spec {path}: {error}.", "give the path of a YAML or JSON file."
        ) from error
    try:
        tree = yaml.safe_load(text)
    except UNREADABLE as error:
        raise InvalidJob(f"{path} is neither YAML nor JSON: {error}.", "fix the syntax at that place.") from error
    return parse(tree)


def parse(tree: Any) -> JobSpec:
    """Validates a job spec given as plain mappings. Raises InvalidJob."""
    if not isinstance(tree, Mapping):
        raise InvalidJob(
            f"a job spec is a mapping of fields, this is {type(tree).__name__}.", "start it with `name:`, `model:`, ..."
        )
    if lines := unwritable(tree):
        raise InvalidJob("\n".join(["the job spec is not valid:", *lines]))
    mistakes = numbers_that_are_none(tree)
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        mistakes += [line for e in error.errors() for line in told(e)]
    if mistakes:
        raise InvalidJob("\n".join(["the job spec is not valid:", *mistakes]))
    return spec
