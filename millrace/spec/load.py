"""From YAML or JSON to a `JobSpec`, with every mistake told as field, value, reason and mend."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from millrace.errors import InvalidJob
from millrace.spec.job import JobSpec


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
    except yaml.YAMLError as error:
        raise InvalidJob(f"{path} is neither YAML nor JSON: {error}.", "mend the syntax at that place.") from error
    return parse(tree)


def parse(tree: Any) -> JobSpec:
    """Validates a job spec given as plain mappings. Raises InvalidJob."""
    if not isinstance(tree, Mapping):
        raise InvalidJob(
            f"a job spec is a mapping of fields, this is {type(tree).__name__}.", "start it with `name:`, `model:`, ..."
        )
    try:
        return JobSpec.model_validate(tree)
    except ValidationError as error:
        mistakes = [line for e in error.errors() for line in _explain(e)]
        raise InvalidJob("\n".join(["the job spec is not valid:", *mistakes])) from error


def _explain(error: Any) -> list[str]:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error" and (not field or isinstance(error["ctx"]["error"].args[0], InvalidJob)):
        return [f"  {line}" for line in str(error["ctx"]["error"]).splitlines()]
    if error["type"] == "extra_forbidden":
        return [f"  {field}: there is no such field. Mend: {_nearest(error['loc'])}"]
    if error["type"] == "missing":
        return [f"  {field}: is missing. Mend: add it."]
    value = json.dumps(error["input"], default=str)
    return [f"  {field}: {value[:200]} will not do: {error['msg']}. Mend: {_allowed(error)}"]


_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _allowed(error: Any) -> str:
    """What would do instead, from pydantic's own bounds."""
    context = {k: v for k, v in error.get("ctx", {}).items() if k != "error"}
    if limits := [f"{words} {context[k]:g}" for k, words in _LIMITS.items() if k in context]:
        return f"give a number that is {' and '.join(limits)}."
    if "expected" in context:
        return f"give {context['expected']}."
    if "pattern" in context:
        return f"give text that matches {context['pattern']}."
    kind = error["type"].removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float").replace("_", " ")
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "list": "a list"}
    return f"give {names.get(kind, kind)}."


def _nearest(location: tuple[int | str, ...]) -> str:
    """Names the field that was probably meant."""
    part: Any = JobSpec
    for step in location[:-1]:
        part = _inner(part, str(step))
    if part is None:
        return "remove it."
    names = list(part.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"remove it; there are {', '.join(names)}."


def _inner(part: Any, name: str) -> type[BaseModel] | None:
    field = part.model_fields.get(name) if part is not None else None
    kinds = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
