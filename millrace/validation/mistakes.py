"""What is wrong with a value that a user wrote, in plain words: field, value, reason and fix.

`explain` translates pydantic's errors for job specs, options of backends and engines, and requests to the REST API. No
name of a Python or pydantic type gets through it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.validation import names as known_names
from millrace.validation.fields import Location, choices, every_path, field_at, model_at, model_in
from millrace.validation.names import choose, closest

Model = TypeVar("Model", bound=BaseModel)


class InvalidValue(ValueError):
    """Raised by a validator of a model that says itself what is wrong."""

    def __init__(self, *mistakes: Mistake) -> None:
        super().__init__("; ".join(map(str, mistakes)))
        self.mistakes = mistakes


def explain(errors: Iterable[ErrorDetails], model: type[BaseModel] | None = None, above: str = "") -> list[Mistake]:
    """The mistakes that `ValidationError.errors()` reports.

    `model` is the model that was validated; with it, misspelt names and values get a suggestion. `above` is the path of
    the field that holds the validated value.
    """
    return [mistake for error in errors for mistake in _explained(error, model, above)]


def options(model: type[Model], given: Mapping[str, Any], above: str) -> Model:
    """`given`, the mapping in the field `above` of a job spec, as the options that a backend or an engine takes. Raises
    InvalidJob with every mistake."""
    mistakes = unwanted_numbers(given, model, above)
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        mistakes += explain(error.errors(), model, above)
    if mistakes:
        raise InvalidJob.of(mistakes)
    return checked


def unwanted_numbers(tree: Mapping[str, Any], model: type[BaseModel], above: str = "") -> list[Mistake]:
    """The mistakes that pydantic accepts: `true` and `false` for a number, which Python counts as 1 and 0, numbers that
    are written as text, and in free options infinite numbers, NaN and whole numbers of more than 64 bits. A spec is
    kept and sent as JSON, which cannot hold those."""
    found: list[Mistake] = []
    for name, value in tree.items():
        field, path = model.model_fields.get(str(name)), _path(above, [str(name)])
        if field is None:
            continue
        inner = model_in(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            found += unwanted_numbers(value, inner, path)
        elif inner is not None and isinstance(value, list):
            entries = [(f"{path}.{number}", entry) for number, entry in enumerate(value) if isinstance(entry, Mapping)]
            found += [mistake for place, entry in entries for mistake in unwanted_numbers(entry, inner, place)]
        elif isinstance(value, bool | str):
            kinds = {field.annotation, *getattr(field.annotation, "__args__", ())}
            if kinds & {int, float} and type(value) not in kinds:
                wanted = _KINDS["int" if int in kinds else "float"]
                fix = f"give {wanted}." if isinstance(value, bool) else f"give {wanted}, without quotes."
                found.append(wrong_value(path, value, f"is not {wanted}", fix))
        elif isinstance(value, Mapping) and (reason := _unwanted_inside(value)):
            found.append(wrong_value(path, value, f"holds a number that {reason}", "give finite numbers."))
    return found


def _unwanted_inside(value: Any) -> str:
    """Why a number somewhere in `value` cannot be kept; empty if all can."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next(filter(None, map(_unwanted_inside, value)), "")
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "needs more than 64 bits"
    return ""


def _explained(error: ErrorDetails, model: type[BaseModel] | None, above: str) -> Sequence[Mistake]:
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, InvalidValue):
        return raised.mistakes
    path, location = _path(above, error["loc"]), error["loc"]
    field = field_at(model, location) if model is not None else None
    if error["type"] == "extra_forbidden":
        return [
            Mistake(_path(above, place), "there is no such field", _nearest_field(model, place))
            for place in [location, *_known_inside(location, error["input"])][:MOST_INSIDE]
        ]
    if error["type"] == "missing":
        return [Mistake(path, "is missing", _example(field, location) or "add it.")]
    reason, fix = _reason_and_fix(error, field)
    return [wrong_value(path, error["input"], reason, fix)]


MOST_INSIDE = 20
"""Mistakes that are listed for one unknown section."""


def _known_inside(location: Location, value: Any) -> Iterator[Location]:
    """The settings below an unknown section that other frameworks have: a file that was written for one of them."""
    if not isinstance(value, Mapping) or known_names.why_absent("", str(location[-1])):
        return
    for name, inner in value.items():
        place = (*location, str(name))
        named = str(name), str(location[-1])
        if known_names.paths(*named) or known_names.why_absent(*reversed(named)):
            yield place
        yield from _known_inside(place, inner)


def _path(above: str, location: Location) -> str:
    return ".".join(filter(None, [above, *map(str, location)]))


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
}
"""Explanations by the first part of pydantic's type of error."""

_BOUNDS = {
    "greater_than": ("gt", "is not more than {}", "more than {}"),
    "greater_than_equal": ("ge", "is less than {}", "at least {}"),
    "less_than": ("lt", "is not less than {}", "less than {}"),
    "less_than_equal": ("le", "is more than {}", "at most {}"),
}
"""Explanations by pydantic's type of error: the key of the bound, the reason and the fix."""

_LENGTHS = {
    "string_too_short": ("min_length", "characters", "at least"),
    "string_too_long": ("max_length", "characters", "at most"),
    "too_short": ("min_length", "entries", "at least"),
    "too_long": ("max_length", "entries", "at most"),
}
"""Explanations by pydantic's type of error: the key of the bound, what is counted, and the fix."""


def _reason_and_fix(error: ErrorDetails, field: FieldInfo | None) -> tuple[str, str]:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        key, reason, fix = _BOUNDS[kind]
        bound = number(context[key])
        return reason.format(bound), f"give a number that is {fix.format(bound)}."
    if kind in _LENGTHS:
        key, counted, fix = _LENGTHS[kind]
        wrong = "fewer" if key == "min_length" else "more"
        return f"has {wrong} than {context[key]} {counted}", _example(
            field, error["loc"]
        ) or f"give {fix} {context[key]}."
    if kind in ("literal_error", "enum"):
        known = choices(field) if field is not None else ()
        fix = choose(str(error["input"]), known) if known else f"give {context['expected']}."
        return "is not one of the known values", fix
    if kind == "finite_number":
        return "is not a finite number", "give a finite number."
    if kind == "string_pattern_mismatch":
        return "does not have the form of this field", f"give text that matches {context['pattern']}."
    if kind == "value_error":
        return str(context["error"]), _example(field, error["loc"]) or _ANOTHER
    wanted = _KINDS.get(kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float"))
    if wanted is None:
        return "is not valid", _example(field, error["loc"]) or _ANOTHER
    return f"is not {wanted}", _example(field, error["loc"]) or f"give {wanted}."


_ANOTHER = "give another value, or leave it out."


def number(value: float) -> str:
    """A bound as people write it: whole numbers with all their digits, others as short as they are exact enough."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def _example(field: FieldInfo | None, location: Location) -> str:
    """The fix that shows what may be written for a mapping or a list; empty for another field, and for an entry."""
    if field is None or not field.examples or isinstance(location[-1], int):
        return ""
    kind = "a list" if isinstance(field.examples[0], list) else "a mapping"
    fix = f"give {kind}, for example `{in_one_line({location[-1]: field.examples[0]})}`"
    return f"{fix}." if field.is_required() else f"{fix}, or leave it out."


def in_one_line(fields: Mapping[Any, Any]) -> str:
    """Fields as a job spec would hold them, in one line of YAML: `betas: [0.9, 0.95]`."""
    return yaml.safe_dump(dict(fields), default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]


def _nearest_field(root: type[BaseModel] | None, location: Location) -> str:
    """The fix that names the field that was probably meant: of this level, of another framework, of another level."""
    if root is None:
        return "remove it."
    level = model_at(root, location[:-1])
    # A setting of a command line keeps its sections in its name: `actor_rollout_ref.rollout.n`.
    *sections, written = ".".join(map(str, location)).removeprefix("+").split(".")
    unit = f" The number counts something else: {note}." if (note := known_names.unit_note(written)) else ""
    names = list(level.model_fields) if level is not None else []
    if (here := known_names.name_here(written, names)) is not None:
        return f"did you mean `{here}`?{unit}"
    section = sections[-1] if sections else ""
    if reason := known_names.why_absent(section, written):
        return f"remove it: {reason}."
    if paths := known_names.paths(written, section):
        return f"here that is {' or '.join(f'`{path}`' for path in paths)}.{unit}"
    if (near := closest(written, names)) is not None:
        return f"did you mean `{near}`?"
    if same := [path for path in every_path(root) if path.rpartition(".")[2] == written]:
        return f"did you mean `{same[0]}`?"
    return f"remove it; the fields here are {', '.join(names)}." if names else "remove it."
