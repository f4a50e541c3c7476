"""Entries of procedural tasks as JSON and back, without loss: scorers distinguish tuples from lists and 1 from "1"."""

from collections.abc import Mapping
from typing import Any

TUPLE, SET, PAIRS = "__tuple__", "__set__", "__pairs__"


def pack(value: Any) -> Any:
    """`value` in JSON's types; `unpack` restores it. Raises TypeError for a value that JSON cannot represent."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, tuple):
        return {TUPLE: [pack(v) for v in value]}
    if isinstance(value, set | frozenset):
        return {SET: [pack(v) for v in sorted(value, key=repr)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in (TUPLE, SET, PAIRS) for key in value):
            return {str(k): pack(v) for k, v in value.items()}
        return {PAIRS: [[pack(k), pack(v)] for k, v in value.items()]}
    if hasattr(value, "tolist"):
        return pack(value.tolist())
    raise TypeError(f"a {type(value).__name__} has no JSON form: {value!r}")


def unpack(value: Any) -> Any:
    """The inverse of `pack`. JSON that was never packed is returned unchanged."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == TUPLE:
            return tuple(unpack(v) for v in inner)
        if key == SET:
            return {unpack(v) for v in inner}
        if key == PAIRS:
            return {unpack(k): unpack(v) for k, v in inner}
    return {k: unpack(v) for k, v in value.items()}
