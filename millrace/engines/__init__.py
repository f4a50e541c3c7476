"""The engines: one file each with what is known of it without importing it.

`rollout.engine_options` are checked when a job is submitted as far as that goes without the engine, and by each
replica for the rest.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.descriptors import EngineDescriptor, read
from millrace.errors import Mistake, wrong_value
from millrace.validation.names import choose, closest

ENGINES: Mapping[str, EngineDescriptor] = read(__name__, __path__)
ENGINE_NAMES = tuple(ENGINES)
FIELD = "rollout.engine_options"


def mistakes_of(engine_options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The options that no replica would take, or none with the engine that they are for."""
    for name, value in engine_options.items():
        if name in ENGINES:
            reserved = ENGINES[name].reserved_options
            yield from (reserved_option(f"{name}.{each}", reserved[each]) for each in value if each in reserved)
            found = (unbuilt_option(ENGINES[name], each, inner, f"{name}.") for each, inner in value.items())
            yield from (mistake for mistake in found if mistake is not None)
        elif isinstance(value, Mapping) and (near := closest(name, ENGINE_NAMES)) is not None:
            fix = f"did you mean `{near}`? The engines are {', '.join(ENGINE_NAMES)}."
            yield Mistake(f"{FIELD}.{name}", "there is no such engine", fix)
        elif not any(name in engine.unreserved_options for engine in ENGINES.values()):
            instead = (e.reserved_options[name] for e in ENGINES.values() if name in e.reserved_options)
            unbuilt = (unbuilt_option(engine, name, value) for engine in ENGINES.values())
            yield from [*(reserved_option(name, field) for field in instead), *filter(None, unbuilt)][:1]


def reserved_option(option: str, instead: str, field: str = FIELD) -> Mistake:
    """The mistake of setting an option of `field` that a job cannot set. `instead` is the field of the job that has the
    same effect; empty if there is none."""
    fix = f"set {instead} instead." if instead else "remove it: the replica sets it."
    return Mistake(f"{field}.{option}", "a job cannot set this option", fix)


def unbuilt_option(engine: EngineDescriptor, option: str, value: Any, below: str = "") -> Mistake | None:
    """The mistake of switching on an option of `engine` that replicas cannot run with yet; None if it is off or
    another. `below` is the path from FIELD to the option."""
    if not value or option not in engine.unbuilt_options:
        return None
    return wrong_value(f"{FIELD}.{below}{option}", value, engine.unbuilt_options[option], "leave it out.")


def unknown_engine(field: str, name: str) -> Mistake:
    """The mistake of naming an engine that does not exist in `field`."""
    return wrong_value(field, name, "there is no such engine", choose(name, ENGINE_NAMES))
