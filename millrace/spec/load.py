"""From YAML or JSON to a `JobSpec`, with every mistake told as field, value, reason and fix."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millrace.errors import InvalidJob
from millrace.spec.document import Document
from millrace.spec.job import JobSpec
from millrace.spec.rules import broken_rules
from millrace.spec.storable import unstorable
from millrace.validation.kinds import kind_of
from millrace.validation.mistakes import explain, unwanted_numbers

HEADING = "the job spec is not valid:"


def load(path: str | Path) -> JobSpec:
    """Reads a job spec from a YAML or JSON file. Raises InvalidJob, with the lines of the fields."""
    document = Document.of_file(Path(path))
    with document.lines():
        return parse(document.tree)


def received(text: str) -> JobSpec:
    """The job spec that another service sent as JSON. Raises InvalidJob."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"the job spec is not JSON: {error}.", "send it as the coordinator validated it.") from error
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
