"""Checks of the values of scorers' options."""

import re
from typing import Any


def compiled(option: str, pattern: Any, flags: int = 0) -> re.Pattern[str]:
    """The compiled `pattern`. Raises ValueError that names the option if it is not a regular expression."""
    if not isinstance(pattern, str):
        raise ValueError(f"{option} has to be a regular expression, not {pattern!r}")
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{option} is not a regular expression: {error}") from error


def flag(option: str, value: Any) -> None:
    """Raises ValueError that names the option if `value` is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{option} has to be true or false, not {value!r}")


def truths_of(ground_truth: Any) -> list[Any]:
    """All accepted ground truths. Raises ValueError if there is none."""
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or any(truth is None for truth in truths):
        raise ValueError(f"the row has no ground truth to compare with: {ground_truth!r}")
    return truths
