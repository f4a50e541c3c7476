"""Makes the pages that describe the job spec.

`python docs/reference.py > docs/job.md`: every field, from the models that check it.
`python docs/reference.py from-verl`: the names in other frameworks, into docs/from-verl.md.
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
from millrace.environments import built_in as environments
from millrace.rewards import BUILT_IN
from millrace.spec import JobSpec
from millrace.spec.algorithm import Choice
from millrace.validation import names as known_names
from millrace.validation.fields import choices, model_in
from millrace.validation.mistakes import number

INTRODUCTION = """# The job spec

This page is made by `python docs/reference.py > docs/job.md` from the models in `millrace/spec`: edit the docstring of
a field, not this page.

A job is one YAML or JSON file. `millrace validate job.yaml` lists every mistake in it, each as `field (line): value:
why. Fix: what to do.` It reads every row of the data, makes tokens of a sample of the prompts and says how many would
be dropped, has the reward score rows in the processes in which a replica would (a function of your own is called for
the first row of each data_source), and builds the model as the trainer would, without its weights. A submission checks
the fields, the options, the files and the first row of each.

Write absolute paths, because each service has its own working folder; [running.md](running.md#on-several-hosts) says
which service reads which file."""
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
FROM_VERL = Path(__file__).with_name("from-verl.md")
NAMES = "what is below is not edited here."
"""The last words of that page before the table that is made here."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every reward function is called with; its other parameters are its options."""
Headings = dict[type[BaseModel], str]
"""The path of the section that describes each model."""


def page() -> str:
    headings: Headings = {}
    for model, path in _models("", JobSpec):
        headings.pop(model, None)  # a model at several paths is described at the last one
        headings[model] = path
    sections = (_section(path, model, headings) for model, path in headings.items())
    rest = (_engines(), *_environments(), *_backends(), *_rewards())
    return "\n\n".join([INTRODUCTION, *sections, *rest]) + "\n"


def _models(path: str, model: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """Each model of the tree with its path. Some models are at several paths."""
    yield model, path
    for name, field in model.model_fields.items():
        if (inner := model_in(field.annotation)) not in (None, Choice):
            yield from _models(f"{path}.{name}".lstrip("."), inner)


def _section(path: str, model: type[BaseModel], headings: Headings) -> str:
    heading = f"{'#' * (2 + path.count('.'))} `{path}`" if path else "## The whole"
    return "\n\n".join(filter(None, [heading, _linked(model.__dict__.get("__doc__") or ""), _table(model, headings)]))


def _table(model: type[BaseModel], headings: Headings) -> str:
    rows = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        rows.append(_row(f"`{name}`", _type(field, headings), _default(field), _linked(field.description or "")))
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(text: str) -> str:
    """The text in one line, with links to the pages that it names."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", " ".join(text.split()))


def _type(field: FieldInfo, headings: Headings) -> str:
    if (inner := model_in(field.annotation)) is not None:
        path = headings.get(inner, "")
        named = f"[`{path}`](#{path.replace('.', '')})" if path else "`{name, options}`"
        if any(get_origin(each) is tuple for each in get_args(field.annotation)):
            named += ", or a list of them"
        return f"{named}, or null" if type(None) in get_args(field.annotation) else named
    limits = [
        f"{sign} {number(getattr(limit, name))}"
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
    others = [
        f", or {word}"
        for kind, word in ((type(None), "null"), (bool, PLAIN[bool]))
        if kind in get_args(field.annotation)
    ]
    return "".join([named, *others])


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
    """The value as a job spec would hold it, in one line."""
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


def _environments() -> Iterator[str]:
    for name, model in environments.BUILT_IN.items():
        table = _table(model, {}) if model.model_fields else ""
        text = _linked(model.__dict__.get("__doc__") or "")
        yield "\n\n".join(filter(None, [f"## `rollout.environment.options` of `{name}`", text, table]))


def _engines() -> str:
    head = "| engine | example | options that a job cannot set, and the field to set instead | not built yet |"
    rows = [head, "|---|---|---|---|"]
    for name, engine in ENGINES.items():
        reserved = [f"`{each}`" + (f" (`{field}`)" if field else "") for each, field in engine.reserved_options.items()]
        unbuilt = ", ".join(f"`{each}`" for each in engine.unbuilt_options)
        rows.append(
            _row(
                f"`{name}`",
                f"`{_yaml(dict(engine.options_example))}`",
                ", ".join(reserved) or "none",
                unbuilt or "none",
            )
        )
    return "## `rollout.engine_options`\n\n" + "\n".join(rows)


def _rewards() -> Iterator[str]:
    rows = ["| function | its `reward.options` | what it gives |", "|---|---|---|"]
    for name, module in BUILT_IN.items():
        scorer = importlib.import_module(module).compute_score
        options = [p for p in inspect.signature(scorer).parameters.values() if p.name not in ARGUMENTS]
        text = "; ".join(f"`{p.name}`, {_plain(p.annotation)}, by default `{_yaml(p.default)}`" for p in options)
        rows.append(_row(f"`{name}`", text, _linked(scorer.__doc__ or "")))
    yield "## `reward.function`\n\n" + "\n".join(rows)


def with_names(written: str) -> str:
    """The page about other frameworks, as `written`, with the table of their names."""
    rows = ["| verl, slime, TRL | Millrace | |", "|---|---|---|"]
    for name in known_names.FIELDS:
        here = " or ".join(f"`{path}`" for path in known_names.paths(name))
        rows.append(_row(f"`{name}`", here, known_names.unit_note(name)))
    rows += [_row(f"`{name}`", f"`{here}`", "") for name, here in known_names.VALUES.items()]
    rows += [_row(f"`{name}`", "–", reason) for name, reason in known_names.ABSENT.items()]
    above, mark, _ = written.partition(NAMES)
    return "\n".join([above + mark, "", *rows]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["from-verl"]:
        FROM_VERL.write_text(with_names(FROM_VERL.read_text()))
    else:
        print(page(), end="")
