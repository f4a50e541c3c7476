"""Checks of `rollout.engine_options` when a job is submitted. No engine is imported: the names and types of its
options are read from the source of its class of options, if the engine is installed."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from millrace import engines
from millrace.descriptors import EngineDescriptor
from millrace.engines import ENGINES, FIELD
from millrace.errors import Mistake, wrong_value
from millrace.imports import syntax_tree
from millrace.rewards.locate import FunctionNotFound, Target, source_file
from millrace.validation.mistakes import number
from millrace.validation.names import closest

SURELY_MISSPELT = 0.9
"""Similarity from which on a name is taken for a misspelt option of an engine that is installed here, although another
engine that is not installed might have an option of that name."""
LARGEST = 2.0**53
"""Numbers of options for which an engine's descriptor has no bounds."""
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}


@dataclass(frozen=True)
class KnownOption:
    """An option of an engine."""

    kinds: frozenset[str]
    """Names of the plain types that it takes, out of KINDS; empty if it takes others, or that is unknown."""


def mistakes_of(engine_options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The options that no replica would take, or none with the engine that they are for."""
    found = list(engines.mistakes_of(engine_options))
    yield from found
    reported = {mistake.field for mistake in found}
    readable = {name: known for name in ENGINES if (known := known_options(name)) is not None}
    for name, value in engine_options.items():
        if name in ENGINES:
            for option, inner in value.items():
                field = f"{FIELD}.{name}.{option}"
                if name in readable and field not in reported:
                    yield from _own(name, option, inner, field, readable[name])
        elif (field := f"{FIELD}.{name}") not in reported:
            yield from _shared(name, value, field, readable)


def known_options(engine: str) -> Mapping[str, KnownOption] | None:
    """The options of an engine by name; None if it is not installed."""
    place, _, name = ENGINES[engine].options_class.partition(":")
    try:
        file = source_file(Target(place, name))
    except FunctionNotFound:
        return None
    return _fields(file, name) if file is not None else None


def _own(engine: str, option: str, value: Any, field: str, known: Mapping[str, KnownOption]) -> Iterator[Mistake]:
    """The mistake in an option that is for one engine."""
    descriptor = ENGINES[engine]
    if option not in known:
        near = closest(option, known)
        class_name = descriptor.options_class.partition(":")[2]
        fix = f"did you mean `{near}`?" if near is not None else f"see the fields of {class_name}, or remove it."
        yield Mistake(field, f"{descriptor.software.title} has no such option", fix)
    else:
        yield from _value(descriptor, option, value, field, known[option])


def _shared(
    option: str, value: Any, field: str, readable: Mapping[str, Mapping[str, KnownOption]]
) -> Iterator[Mistake]:
    """The mistake in an option that is for every engine: none that is installed here has it, or takes its value."""
    having = {engine: known[option] for engine, known in readable.items() if option in known}
    if having:
        wrong = [list(_value(ENGINES[engine], option, value, field, known)) for engine, known in having.items()]
        yield from min(wrong, key=len)
        return
    names = sorted({name for known in readable.values() for name in known})
    near = closest(option, names)
    sure = near is not None and closest(option, [near], SURELY_MISSPELT) is not None
    if readable and (sure or len(readable) == len(ENGINES)):
        fix = f"did you mean `{near}`?" if near is not None else "remove it."
        absent = [name for name in ENGINES if name not in readable]
        fix += f" An option of {absent[0]} is put under `{absent[0]}`." if absent else ""
        yield Mistake(field, f"there is no such option of {' or '.join(readable)}", fix)


def _value(descriptor: EngineDescriptor, option: str, value: Any, field: str, known: KnownOption) -> Iterator[Mistake]:
    if known.kinds and _kind(value) not in known.kinds | ({"int"} if "float" in known.kinds else set()):
        wanted = " or ".join(KINDS[kind] for kind in KINDS if kind in known.kinds - {"None"})
        yield wrong_value(field, value, f"is not {wanted}", f"give {wanted}.")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        least, most = descriptor.option_bounds.get(option, (-LARGEST, LARGEST))
        if not least <= value <= most:
            bounds = f"from {number(least)} to {number(most)}"
            yield wrong_value(field, value, f"is not {bounds}", f"give a number {bounds}.")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


@cache
def _fields(file: Path, class_name: str) -> Mapping[str, KnownOption] | None:
    """The annotated fields of a class in a file, and of its bases there; None if the file has no such class."""
    classes = {node.name: node for node in syntax_tree(file).body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        return None
    found: dict[str, KnownOption] = {}
    pending = [class_name]
    while pending:
        node = classes[pending.pop()]
        pending += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name, kinds = statement.target.id, _plain_kinds(statement.annotation)
                if not name.startswith("_"):
                    found.setdefault(name, KnownOption(kinds if kinds <= KINDS.keys() else frozenset()))
    return found


def _plain_kinds(annotation: ast.expr) -> frozenset[str]:
    """The names of the types in a union; a name outside KINDS stands for any other type."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _plain_kinds(left) | _plain_kinds(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _plain_kinds(inner) | {"None"}
        case ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _plain_kinds(inner)
        case ast.Constant(value=None):
            return frozenset({"None"})
        case ast.Name(id=name):
            return frozenset({name})
    return frozenset({"other"})
