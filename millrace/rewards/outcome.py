"""The result of a scorer, checked strictly: one finite number, small enough for float32, and plain details."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

LONGEST_REPR = 200
LARGEST = 1e15
"""Largest reward. The trainer computes in float32, where sums over a batch of squares up to this size are finite."""
NOT_FINITE = f"not a number to compute with in float32; give a finite one of at most {LARGEST:.0e} in size"


class BadOutcome(ValueError):
    """A scorer returned something that is not a score: `returned nan`, `returned None, not a number`."""


@dataclass(frozen=True)
class Outcome:
    """The score of an answer, and what a scorer says about it."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)
    """Everything else that the scorer returned, in JSON's types."""


def read_outcome(returned: Any) -> Outcome:
    """The outcome of a number, a numpy or torch scalar, or a mapping with such a `score`. Raises BadOutcome."""
    if not isinstance(returned, Mapping):
        return Outcome(_number(returned, ""))
    if "score" not in returned:
        raise BadOutcome(f"returned a mapping without `score`: {_short(dict(returned))}")
    return Outcome(
        _number(returned["score"], "score "), {str(k): plain(v) for k, v in returned.items() if k != "score"}
    )


def read_outcomes(returned: Any, count: int) -> list[Outcome]:
    """The outcomes of `count` answers from what a function returned for all of them: a list, an array or a tensor of
    what `read_outcome` reads. Raises BadOutcome."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise BadOutcome(f"returned {_short(returned)}, not a list of scores")
    if len(returned) != count:
        raise BadOutcome(f"returned {len(returned)} scores for {count} answers")
    found = []
    for number, each in enumerate(returned, start=1):
        try:
            found.append(read_outcome(each))
        except BadOutcome as error:
            raise BadOutcome(f"{error} (answer {number} of {count})") from error
    return found


def separate_rewards(score: float, details: Mapping[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    """The numbers with these names among the details of a score, in order; `score` is the score itself. Raises
    BadOutcome."""
    found = {"score": score, **details}
    if missing := [name for name in names if name not in found]:
        raise BadOutcome(f"returned no {missing[0]!r}, which reward.parts names")
    return tuple(_number(found[name], f"{name} ") for name in names)


def _number(value: Any, name: str) -> float:
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        value = _item(value)
    if not isinstance(value, Real | Decimal):
        raise BadOutcome(f"returned {name}{_short(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not fits(number):
        raise BadOutcome(f"returned {name}{number}, {NOT_FINITE}")
    return number


def fits(reward: float) -> bool:
    """Whether a reward is finite and small enough for float32."""
    return abs(reward) <= LARGEST


def _item(value: Any) -> Any:
    """The Python number in a numpy or torch scalar; the value itself if it holds more than one."""
    try:
        return value.item()
    except (ValueError, RuntimeError, TypeError):
        return value


def plain(value: Any) -> Any:
    """`value` in JSON's types; a value that JSON cannot represent becomes its shortened text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_REPR else text[: LONGEST_REPR - 3] + "..."
