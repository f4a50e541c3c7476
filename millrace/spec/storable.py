"""What a job spec must not hold: values that no JSON, file name or store takes."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import Mistake, wrong_value

DEEPEST, MOST_VALUES = 50, 100_000
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def unstorable(tree: Mapping[str, Any]) -> list[Mistake]:
    """The mistakes about mappings that contain themselves, far too many values, bytes, and text with NUL characters or
    with half of a surrogate pair."""
    found: list[Mistake] = []
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), tree)]
    for count in itertools.count(1):
        if not waiting:
            break
        location, value = waiting.pop()
        field = ascii(".".join(map(str, location)))[1:-1]
        if len(location) > DEEPEST:
            start = ".".join(field.split(".")[:3])
            return [Mistake(start, f"contains itself, or is more than {DEEPEST} levels deep", "write plain options.")]
        if count > MOST_VALUES:
            return [Mistake(field, f"a job spec has at most {MOST_VALUES} values", "put data into files.")]
        if isinstance(value, bytes) or (isinstance(value, str) and _UNSTORABLE.search(value)):
            reason = "has bytes, a NUL or half a character, which cannot be stored"
            found.append(wrong_value(field, value, reason, "give plain text."))
        elif isinstance(value, Mapping):
            waiting += [((*location, str(name)), inner) for name, inner in value.items()]
            waiting += [((*location, str(name)), name) for name in value if isinstance(name, str | bytes)]
        elif isinstance(value, list | tuple):
            waiting += [((*location, place), inner) for place, inner in enumerate(value)]
    return found
