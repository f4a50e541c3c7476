"""The job spec. `load(path)` and `parse(mapping)` give a `JobSpec` or raise `InvalidJob` that lists every mistake."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.spec.document import Document
from millrace.spec.job import JobSpec
from millrace.spec.rules import broken_rules
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


DEEPEST, MOST_VALUES = 50, 100_000
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def unstorable(tree: Mapping[str, Any]) -> list[Mistake]:
    """The mistakes about mappings that contain themselves, far too many values, bytes, and text with NUL characters or
    with half of a surrogate pair."""
    found: list[Mistake] = []
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), tree)]
    for count in itertools.count(1):
        if not waiting:
            break
        location, value = waiting.pop()
        field = ascii(".".join(map(str, location)))[1:-1]
        if len(location) > DEEPEST:
            start = ".".join(field.split(".")[:3])
            return [Mistake(start, f"contains itself, or is more than {DEEPEST} levels deep", "write plain options.")]
        if count > MOST_VALUES:
            return [Mistake(field, f"a job spec has at most {MOST_VALUES} values", "put data into files.")]
        if isinstance(value, bytes) or (isinstance(value, str) and _UNSTORABLE.search(value)):
            reason = "has bytes, a NUL or half a character, which cannot be stored"
            found.append(wrong_value(field, value, reason, "give plain text."))
        elif isinstance(value, Mapping):
            waiting += [((*location, str(name)), inner) for name, inner in value.items()]
            waiting += [((*location, str(name)), name) for name in value if isinstance(name, str | bytes)]
        elif isinstance(value, list | tuple):
            waiting += [((*location, place), inner) for place, inner in enumerate(value)]
    return found


__all__ = ["JobSpec", "load", "parse", "received"]
