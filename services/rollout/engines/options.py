"""What the options and releases of every engine library are checked for."""

import difflib
from collections.abc import Mapping, Set

from millrace.engines import FIELD, ours_to_set
from millrace.errors import InvalidJob


def check_name(name: str, known: Set[str], ours: Mapping[str, str], library: str, options: str) -> None:
    """Raises InvalidJob for an option of rollout.engine_options that is the replica's to set, or that `library` does
    not have. `ours` names the job's field that says it instead, `options` the library's class of options."""
    field = f"{FIELD}.{name}"
    if name in ours:
        raise ours_to_set(name, ours[name])
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"see the fields of {library}'s {options}."
        raise InvalidJob(f"{field}: {library} has no such option.", fix)


def untried(library: str, found: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> str:
    """Why release `found` may not work; empty where it lies between the two that were tried."""
    parts = tuple(int(p) for p in found.split(".")[: len(oldest)] if p.isdigit())
    if oldest <= parts <= newest:
        return ""
    first, last = (".".join(map(str, release)) for release in (oldest, newest))
    tried = f"{first} was" if first == last else f"{first} to {last} were"
    return f"{library} {found} was not tried; {tried}. Watch the log-probability mismatch of the first steps."
