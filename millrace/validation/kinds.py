"""The kinds of values that a YAML or JSON file holds, in plain words."""

from collections.abc import Mapping, Sequence


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
