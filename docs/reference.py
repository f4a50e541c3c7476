"""`python docs/reference.py > docs/job.md`: every field of the job spec, from the models that check it.

`python docs/reference.py from-verl` writes the names of other trainers into docs/from-verl.md.
"""

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.backends import BACKENDS
from millrace.engines import ENGINES
from millrace.rewards import BUILT_IN
from millrace.spec import JobSpec
from millrace.spec.algorithm import Choice
from millrace.validation import foreign_names
from millrace.validation.fields import choices, model_in

INTRODUCTION = """# The job spec

Made by `python docs/reference.py > docs/job.md` from the models in `millrace/spec`: fix a field's docstring, not this
page.

A job is one YAML or JSON file. `millrace validate job.yaml` tells every mistake in it with the fix. Write whole paths,
as every service has a working folder of its own; [running.md](running.md#on-several-hosts) says which of them reads
what."""
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
FROM_VERL = Path(__file__).with_name("from-verl.md")
NAMES = "what is below is not edited here."
"""Ends what people write in that page."""
LEFT = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function is called with: not its options."""
Homes = dict[type[BaseModel], str]
"""The path at which the table of each part is."""


def page() -> str:
    homes: Homes = {}
    for part, path in _places("", JobSpec):
        homes.pop(part, None)  # of several places the last
        homes[part] = path
    parts = (_section(path, part, homes) for part, path in homes.items())
    return "\n\n".join([INTRODUCTION, *parts, _engines(), *_backends(), *_rewards()]) + "\n"


def _places(path: str, part: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """Each part of the tree with its path; some stand at several."""
    yield part, path
    for name, field in part.model_fields.items():
        if (inner := model_in(field.annotation)) not in (None, Choice):
            yield from _places(f"{path}.{name}".lstrip("."), inner)


def _section(path: str, part: type[BaseModel], homes: Homes) -> str:
    heading = f"{'#' * (2 + path.count('.'))} `{path}`" if path else "## The whole"
    return "\n\n".join(filter(None, [heading, _linked(part.__dict__.get("__doc__") or ""), _table(part, homes)]))


def _table(part: type[BaseModel], homes: Homes) -> str:
    rows = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for name, field in part.model_fields.items():
        rows.append(_row(f"`{name}`", _type(field, homes), _default(field), _linked(field.description or "")))
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(text: str) -> str:
    """In one line, with links to the pages that it names."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", " ".join(text.split()))


def _type(field: FieldInfo, homes: Homes) -> str:
    if (inner := model_in(field.annotation)) is not None:
        named = "`{name, options}`" if inner is Choice else f"[`{homes[inner]}`](#{homes[inner].replace('.', '')})"
        return f"{named}, or null" if type(None) in get_args(field.annotation) else named
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_choice(field) or _plain(field.annotation), *limits])


def _choice(field: FieldInfo) -> str:
    """The type of a field, or of a list's entries, that are one of some names; empty for another field."""
    named = " or ".join(f"`{name}`" for name in choices(field))
    if not named or get_origin(field.annotation) is list:
        return named and f"list of {named}"
    return f"{named}, or null" if type(None) in get_args(field.annotation) else named


def _plain(kind: Any) -> str:
    arguments = get_args(kind)
    match get_origin(kind):
        case None:
            return PLAIN[kind]
        case origin if origin is Annotated:
            return _plain(arguments[0])
        case origin if origin in (Union, types.UnionType):
            return ", or ".join("null" if one is type(None) else _plain(one) for one in arguments)
        case origin if origin is dict:
            return "mapping"
        case origin if origin is tuple and Ellipsis not in arguments:
            return f"list of {len(arguments)}, each a {_plain(arguments[0])}"
    return f"list of {_plain(arguments[0])}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True)
        return f"`{_yaml(given)}`" if given else ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """In one line, as a job would say it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return f"{{{', '.join(f'{name}: {_yaml(inner)}' for name, inner in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_yaml, value))}]"
        case float() if 0 < abs(value) < 1e-4:
            mantissa, _, exponent = f"{value:e}".partition("e")
            return f"{float(mantissa)}e{int(exponent)}"
        case float():
            return f"{value:g}"
    return str(value)


def _backends() -> Iterator[str]:
    for name, backend in BACKENDS.items():
        link = backend.page.removeprefix("docs/")
        table = f"In [{link.partition('#')[0]}]({link})." if link else _table(backend.options, {})
        yield f"## `trainer.backend_options` of `{name}`\n\n{table}"


def _engines() -> str:
    rows = ["| engine | example | options that a job cannot set, and the field to set instead |", "|---|---|---|"]
    for name, engine in ENGINES.items():
        reserved = (
            f"`{option}`" + (f" (`{field}`)" if field else "") for option, field in engine.reserved_options.items()
        )
        rows.append(_row(f"`{name}`", f"`{_yaml(dict(engine.options_example))}`", ", ".join(reserved) or "none"))
    return "## `rollout.engine_options`\n\n" + "\n".join(rows)


def _rewards() -> Iterator[str]:
    rows = ["| function | its `reward.options` | what it gives |", "|---|---|---|"]
    for name, module in BUILT_IN.items():
        scorer = importlib.import_module(module).compute_score
        options = [p for p in inspect.signature(scorer).parameters.values() if p.name not in LEFT]
        told = "; ".join(f"`{p.name}`, {_plain(p.annotation)}, by default `{_yaml(p.default)}`" for p in options)
        rows.append(_row(f"`{name}`", told, _linked(scorer.__doc__ or "")))
    yield "## `reward.function`\n\n" + "\n".join(rows)


def with_names(written: str) -> str:
    """The page about other trainers with the table of their names."""
    rows = ["| verl, slime, TRL | Millrace | |", "|---|---|---|"]
    for name in foreign_names.FIELDS:
        here = " or ".join(f"`{place}`" for place in foreign_names.paths(name))
        rows.append(_row(f"`{name}`", here, foreign_names.unit_note(name)))
    above, mark, _ = written.partition(NAMES)
    return "\n".join([above + mark, "", *rows]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["from-verl"]:
        FROM_VERL.write_text(with_names(FROM_VERL.read_text()))
    else:
        print(page(), end="")
