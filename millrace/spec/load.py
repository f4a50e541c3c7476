"""From YAML or JSON to a `JobSpec`, with every mistake told as field, value, reason and fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from millrace.errors import InvalidJob
from millrace.spec.job import JobSpec
from millrace.spec.rules import broken_rules
from millrace.spec.storable import unstorable
from millrace.validation.kinds import kind_of
from millrace.validation.mistakes import explain, unwanted_numbers

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
HEADING = "the job spec is not valid:"


def load(path: str | Path) -> JobSpec:
    """Reads a job spec from a YAML or JSON file. Raises InvalidJob."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{path}: is not text in UTF-8.", "give the path of a YAML or JSON file.") from error
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InvalidJob(f"{path}: {reason}.", "give the path of a YAML or JSON file that can be read.") from error
    try:
        tree = yaml.safe_load(text)
    except UNREADABLE as error:
        place = getattr(error, "problem_mark", None)
        fix = "correct the syntax." if place is None else f"correct the YAML syntax in line {place.line + 1}."
        raise InvalidJob(f"{path}: is neither YAML nor JSON: {error}.", fix) from error
    return parse(tree)


def parse(tree: Any) -> JobSpec:
    """Checks a job spec that is given as plain mappings. Raises InvalidJob with every mistake."""
    if not isinstance(tree, Mapping):
        what = f"a job spec is a mapping of fields, and this is {kind_of(tree)}."
        raise InvalidJob(what, "start it with `name:`, `model:`, ...")
    if mistakes := unstorable(tree):
        raise InvalidJob.of(mistakes, HEADING)
    mistakes = unwanted_numbers(tree, JobSpec)
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        raise InvalidJob.of([*mistakes, *explain(error.errors(), JobSpec)], HEADING) from error
    if mistakes := [*mistakes, *broken_rules(spec)]:
        raise InvalidJob.of(mistakes, HEADING)
    return spec
