"""Misspelt names: which known name was probably meant."""

import difflib
from collections.abc import Collection

from millrace.validation import foreign_names

SIMILAR = 0.6
"""Least similarity, from 0 to 1, of a name that is suggested (`difflib.SequenceMatcher.ratio`)."""


def closest(name: str, known: Collection[str], similar: float = SIMILAR) -> str | None:
    """The known name that somebody probably meant who wrote `name`: the one that another framework calls so, or the
    one with the most similar spelling, of at least this similarity. None where no name is similar."""
    if (here := foreign_names.name_here(name, known)) is not None:
        return here
    lowered = {each.lower(): each for each in known}
    return next((lowered[near] for near in difflib.get_close_matches(name.lower(), lowered, 1, similar)), None)


def choose(name: str, known: Collection[str]) -> str:
    """The fix for a `name` that is none of `known`: "did you mean `x`? Choose one of x, y."."""
    listed = f"one of {', '.join(known)}."
    near = closest(name, known)
    return f"did you mean `{near}`? Choose {listed}" if near is not None else f"choose {listed}"
