"""Job specs of earlier releases: fields that have another name or form now. A spec in the store, of a paused job or of
one that is resumed, is read as if it had been written for this release; so is a file of a user.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """A field that has another name now."""

    level: str
    """Path of the level that holds it; `*` stands for each entry of a list."""
    old: str
    new: str
    convert: Callable[[Any], Any] = lambda value: value
    """Makes the new value of the old one. A value that the old field did not allow stays as it is."""
    until: str = ""
    """The last release that wrote the old name."""


def _variable(name: Any) -> Any:
    return f"env:{name}" if isinstance(name, str) else name


RENAMED = (Renamed("reward.functions.*.judge", "api_key_env", "api_key", _variable, until="0.1"),)


def migrated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the spec's tree with the names of this release. If both names are given the tree keeps both, so that
    the check of the spec refuses the old one."""
    copied = {**tree}
    for renamed in RENAMED:
        for level in _levels(copied, renamed.level.split(".")):
            if renamed.old in level and renamed.new not in level:
                level[renamed.new] = renamed.convert(level.pop(renamed.old))
    return copied


def _levels(parent: dict[str, Any], steps: list[str]) -> Iterator[dict[str, Any]]:
    """The mappings at the path below `parent`. Each level on the way is replaced by a copy."""
    if not steps:
        yield parent
        return
    step, *rest = steps
    held = parent.get(step)
    if isinstance(held, Mapping):
        parent[step] = copied = dict(held)
        yield from _levels(copied, rest)
    elif isinstance(held, list) and rest[:1] == ["*"]:
        parent[step] = entries = [dict(entry) if isinstance(entry, Mapping) else entry for entry in held]
        for entry in entries:
            if isinstance(entry, dict):
                yield from _levels(entry, rest[1:])
