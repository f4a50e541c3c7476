"""Checks of what a user may give as the value of a scorer's option."""

import re
from typing import Any


def compiled(option: str, pattern: Any, flags: int = 0) -> re.Pattern[str]:
    """Raises ValueError, naming the option, for what is not a regular expression."""
    if not isinstance(pattern, str):
        raise ValueError(f"{option} is a regular expression, not {pattern!r}")
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{option} is not a regular expression: {error}") from error


def flag(option: str, value: Any) -> None:
    """Raises ValueError, naming the option, for what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{option} is true or false, not {value!r}")
