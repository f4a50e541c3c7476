"""Errors for a model whose weights do not fit the engine's. They refuse the job: every publication would fail in the
same way, or leave out what was trained."""

from collections.abc import Sequence

from millrace.errors import InvalidJob

SHOWN = 5
"""Names that an error shows."""
SAME_FOLDER = "see that trainer and engine load the same model folder."


def loader_refused(error: Exception) -> InvalidJob:
    """The engine's own loader raised `error`."""
    return InvalidJob(f"the engine's loader refused the weights: {type(error).__name__}: {error}.", SAME_FOLDER)


def parameters_unwritten(names: Sequence[str]) -> InvalidJob:
    """Parameters of the engine would keep values that were never published."""
    what = f"the publication writes nothing to, or only a part of, {_shown(names)}."
    return InvalidJob(what, SAME_FOLDER)


def tensors_untaken(names: Sequence[str]) -> InvalidJob:
    """No worker of the engine has a place for published tensors: it would generate without what was trained."""
    what = f"the engine's model has no place for {_shown(names)}, which the trainer trains."
    return InvalidJob(what, "use an engine, or a release of it, that computes with them, or another model.")


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
