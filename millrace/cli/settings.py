"""`--set FIELD=VALUE`: new values of fields of a job spec on the command line, and sweeps over several of them."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.descriptors import EngineDescriptor
from millrace.engines import ENGINES
from millrace.errors import InvalidJob, Mistake, NotFound

if TYPE_CHECKING:
    from millrace.spec import JobSpec
    from millrace.spec.document import Document

MOST_SWEPT = 256
"""Jobs of one sweep."""
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="New value of a field of the job spec, for example trainer.token_budget=8192. Can be repeated.",
    ),
]
Swept = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE[,VALUE…]",
        help="New value of a field of the job spec, for example trainer.token_budget=8192. Can be repeated. Several "
        "values with commas between them give a job for each, and several such fields a job for each combination: "
        "--set trainer.optimizer.lr=1e-6,3e-6. A list in brackets is one value ([1,2]), and so is text in quotes "
        "('\"a,b\"').",
    ),
]


SpecFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, YAML or JSON.", show_default=False)]


@dataclass(frozen=True)
class Variant:
    """One job of a sweep."""

    suffix: str
    """Says which values it has, for its name: `lr-1e-6.seed-1`. Empty if there is only one job."""
    changes: dict[str, Any]


def read(path: Path, variant: Variant) -> "tuple[Document, JobSpec]":
    """The job spec of a file with the values of --set in place of the file's. Raises InvalidJob."""
    from millrace.spec import parse
    from millrace.spec.document import Document

    document = Document.of_file(path)
    if isinstance(document.tree, Mapping):
        document.change(applied(document.tree, variant))
    with document.lines():
        return document, parse(document.tree)


def known_engine(name: str) -> EngineDescriptor:
    """The engine that --engine names. Raises NotFound."""
    if name not in ENGINES:
        raise NotFound(f"--engine: {name}: there is no such engine.", f"give one of {', '.join(ENGINES)}.")
    return ENGINES[name]


def changes_of(settings: Sequence[str] | None) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}; values are YAML. Raises InvalidJob, also for several values of a field."""
    for setting in settings or ():
        if len(values := split(setting.partition("=")[2])) > 1:
            reason = f"has {len(values)} values, and only `millrace submit` makes a job for each"
            raise _wrong_setting(setting, reason, "give one value, a list as [1,2], or text in quotes.")
    (only,) = variants_of(settings)
    return only.changes


def variants_of(settings: Sequence[str] | None) -> list[Variant]:
    """Every combination of the values, in the order in which they are given. Raises InvalidJob."""
    choices = [_choices(setting) for setting in settings or ()]
    swept = [path for path, values in choices if len(values) > 1]
    names = [path.rpartition(".")[2] for path in swept]
    titles = {p: n if names.count(n) == 1 else p for p, n in zip(swept, names, strict=True)}
    count = 1
    for _, values in choices:
        count *= len(values)
    if count > MOST_SWEPT:
        fix = "give fewer values."
        raise InvalidJob.of([Mistake("--set", f"would be {count} jobs, and one sweep may have {MOST_SWEPT}", fix)])
    variants = []
    for combination in itertools.product(*(values for _, values in choices)):
        chosen = [(path, text) for (path, _), text in zip(choices, combination, strict=True)]
        parts = [f"{titles[path]}-{_plain(text)}" for path, text in chosen if path in titles]
        variants.append(Variant(".".join(parts), _tree(chosen)))
    return variants


def applied(tree: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """What a variant of a sweep changes in the spec with this tree: its values, its name, and its output folder unless
    that has the name or the id in it."""
    from millrace.spec.document import merged

    changes = dict(variant.changes)
    if not variant.suffix:
        return changes
    after = merged(tree, changes)
    changes["name"] = f"{after.get('name', '')}-{variant.suffix}"
    output = after.get("output")
    if isinstance(output, str) and "{name}" not in output and "{id}" not in output:
        changes["output"] = f"{output}/{variant.suffix}"
    return changes


def split(text: str) -> list[str]:
    """The values between commas that are in no brackets and no quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and (depth or not values[-1].strip()):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            values.append("")
            continue
        values[-1] += character
    return values


def _choices(setting: str) -> tuple[str, list[str]]:
    path, given, text = setting.partition("=")
    if not given or not all(path.split(".")):
        raise _wrong_setting(setting, "has no field and value", "write it as trainer.token_budget=8192.")
    values = split(text)
    if len(values) > 1 and not all(value.strip() for value in values):
        raise _wrong_setting(setting, "one of its values is empty", "put text with commas in quotes.")
    return path, values


def _tree(chosen: Sequence[tuple[str, str]]) -> dict[str, Any]:
    from millrace.spec.document import UNREADABLE, Document

    tree: dict[str, Any] = {}
    for path, text in chosen:
        setting = f"{path}={text}"
        *above, name = path.split(".")
        try:
            read = Document(text).tree
        except UNREADABLE as error:
            raise _wrong_setting(setting, f"the value is not YAML: {error}", "put the value in quotes.") from error
        group = tree
        for part in above:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise _wrong_setting(setting, f"{part} has a value already", "give the group or its fields, not both.")
        group[name] = read
    return tree


def _plain(text: str) -> str:
    """A value in the characters of a job's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text.strip().replace("+", "")).strip("-") or "value"


def _wrong_setting(setting: str, reason: str, fix: str) -> InvalidJob:
    return InvalidJob.of([Mistake("--set", reason, fix, setting)])
