"""Checks of options that are the same for every engine."""

from collections.abc import Set

from millrace.engines import ENGINES, FIELD, reserved_option
from millrace.errors import InvalidJob, Mistake
from millrace.validation.names import closest


def check_name(engine: str, name: str, known: Set[str], options: str) -> None:
    """Raises InvalidJob for an option of rollout.engine_options that the replica sets itself, or that is none of
    `known`. `options` is the engine's class of options, for the fix."""
    descriptor = ENGINES[engine]
    if name in descriptor.reserved_options:
        raise InvalidJob.of([reserved_option(name, descriptor.reserved_options[name])])
    if name not in known:
        title, near = descriptor.software.title, closest(name, known)
        fix = f"did you mean `{near}`?" if near is not None else f"see the fields of {title}'s {options}."
        raise InvalidJob.of([Mistake(f"{FIELD}.{name}", f"{title} has no such option", fix)])
