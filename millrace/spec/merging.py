"""New values of fields, put into the tree of a job spec."""

from collections.abc import Mapping
from typing import Any

OPTIONS = (
    "rollout.engine_options",
    "trainer.backend_options",
    "trainer.reference.backend_options",
    "trainer.critic.backend_options",
)
"""Mappings of names that are not the spec's own: null takes one out."""


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The tree with the changes in it. Fields of a group that the changes do not name stay as they are; null removes
    one of OPTIONS. A function that takes the place of another one does not get its options. `above` is the path of
    `tree` in the whole spec, with a dot at its end."""
    both = dict(tree)
    for name, value in changes.items():
        held = both.get(name)
        if isinstance(value, Mapping) and isinstance(held, Mapping) and not _another_function(held, value):
            both[name] = merged(held, value, f"{above}{name}.")
        elif value is None and above.startswith(tuple(f"{group}." for group in OPTIONS)):
            both.pop(name, None)
        else:
            both[name] = value
    return both


def _another_function(held: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether both choose a function by its name, with options, and not the same one."""
    return set(held) <= {"name", "options"} and value.get("name", held.get("name")) != held.get("name")
