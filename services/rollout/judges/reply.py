"""Reads scores from what a judge says."""

import json
import math
from collections.abc import Sequence
from typing import Any

LONGEST_SHOWN = 200
LARGEST_REPLY = 1 << 20
"""Characters of a reply that are looked at, from its end."""
MOST_OBJECTS = 200
"""Places of a reply at which a JSON object is looked for."""
PATTERN_S = 1.0
"""Seconds that a pattern may take for a reply."""


class NoScore(ValueError):
    """A reply holds no scores, or others than were asked for; the text says which."""


def scores_by_pattern(reply: str, pattern: str, count: int) -> list[float]:
    """The number in the first group of the last match of `pattern`, or in the match; for more than one answer those of
    all matches, in order. Raises NoScore."""
    import regex

    try:
        found = [
            match[1] if match.re.groups else match[0]
            for match in regex.finditer(pattern, reply[-LARGEST_REPLY:], timeout=PATTERN_S, concurrent=True)
        ]
    except TimeoutError as error:
        raise NoScore(f"judge.pattern took more than {PATTERN_S:g} s for {_short(reply)}") from error
    if not found:
        raise NoScore(f"judge.pattern matches nothing in {_short(reply)}")
    return _numbers(found[-1:] if count == 1 else found, count, reply)


def scores_in_json(reply: str, field: str, count: int) -> list[float]:
    """The number under `field` in the last JSON object of the reply that has it; for more than one answer a list of
    numbers. Raises NoScore."""
    values = [found[field] for found in _objects(reply[-LARGEST_REPLY:]) if field in found]
    if not values:
        raise NoScore(f"there is no JSON object with {field!r} in {_short(reply)}")
    value = values[-1]
    return _numbers(value if isinstance(value, list) else [value], count, reply)


def scaled(number: float, scale: Sequence[float] | None) -> float:
    """The number as a part of the way from the first to the second end of `scale`. Raises NoScore for one outside."""
    if scale is None:
        return number
    worst, best = scale
    if not min(worst, best) <= number <= max(worst, best):
        raise NoScore(f"{number:g} is not on the scale from {worst:g} to {best:g}")
    return (number - worst) / (best - worst)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, without those inside others."""
    decoder, found = json.JSONDecoder(), list[dict[str, Any]]()
    start = tried = 0
    while (start := text.find("{", start)) >= 0 and tried < MOST_OBJECTS:
        tried += 1
        try:
            value, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
        else:
            found.append(value)
    return found


def _numbers(values: Sequence[Any], count: int, reply: str) -> list[float]:
    if len(values) != count:
        raise NoScore(f"there are {len(values)} scores for {count} answers in {_short(reply)}")
    return [_number(value, reply) for value in values]


def _number(value: Any, reply: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise NoScore(f"{_short(str(value))} is not a number, in {_short(reply)}")
    return number


def _short(text: str) -> str:
    shown = text if len(text) <= LONGEST_SHOWN else "…" + text[-LONGEST_SHOWN:]
    return json.dumps(shown, ensure_ascii=False)
