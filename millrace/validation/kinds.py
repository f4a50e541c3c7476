"""What a YAML or JSON file holds: the kinds of its values in plain words, and its fields one by one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def kind_of(value: object) -> str:
    """What `value` is for somebody who does not know Python: `a mapping`, `a list`, `text`, `a whole number`, ..."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "text"
        case bytes():
            return "bytes"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case Mapping():
            return "a mapping"
        case Sequence() | set() | frozenset():
            return "a list"
    return f"a {type(value).__name__}"


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every field that holds no further fields: `("trainer.optimizer.lr", 1e-6)`."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield above + name, value
