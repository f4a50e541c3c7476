"""The folders that jobs may use, if an operator names some."""

import os
from collections.abc import Iterable

ROOTS = "MILLRACE_ROOTS"
"""Environment variable with these folders, separated as in PATH. Not set: jobs may use any folder."""


def roots() -> list[str]:
    """The folders, without symbolic links; none if the variable is not set."""
    return [os.path.realpath(root) for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]


def lies_below(place: str, folders: Iterable[str]) -> bool:
    """Whether an absolute path lies in one of the `folders`. None of them has symbolic links."""
    return any(os.path.commonpath((place, folder)) == folder for folder in folders)
