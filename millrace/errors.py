"""What goes wrong, told to a reader: what happened, to whom, and the fix.

Every error that a user or another service may see is a `MillraceError`. On the wire it becomes a gRPC status whose
details are `str(error)`; over REST a problem document with the same fields.
"""

import json
from typing import Any


class MillraceError(Exception):
    """`what` happened (naming field, value, member, version, epoch) and the `fix`: what to do next."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} Fix: {self.fix}" if self.fix else self.what


class InvalidJob(MillraceError):
    """A job spec, or something it names, cannot work. Refused at submission."""


def refused(field: str, value: Any, reason: str, fix: str) -> InvalidJob:
    """Says of one field of a job spec that its value will not do. `reason` comes without a full stop, `fix` with."""
    return InvalidJob(f"{field}: {json.dumps(value, default=str)} will not do: {reason}.", fix)


class InvalidState(MillraceError):
    """The request does not fit the state that its object is in (pausing a finished job)."""


class NotFound(MillraceError):
    """No such job, member or lease."""


class Fenced(MillraceError):
    """The caller's fencing token, epoch or version is old: somebody else holds what it claims to hold."""


class BadRow(MillraceError):
    """A data row, a reward or a tokenizer failed on one prompt. Costs that prompt's group, never the job."""


class PublicationFailed(MillraceError):
    """A publication did not reach every member; `culprits` are the addresses or ids of those that failed."""

    def __init__(self, what: str, fix: str = "", culprits: tuple[str, ...] = ()) -> None:
        super().__init__(what, fix)
        self.culprits = culprits

    def again(self) -> "PublicationFailed":
        """The same, to be raised elsewhere: one that was raised keeps alive what was in the frames that it left."""
        return PublicationFailed(self.what, self.fix, self.culprits)


class Unavailable(MillraceError):
    """A service or store that is needed did not answer in time."""


class NonFinite(MillraceError):
    """NaN or infinity in log-probabilities, rewards, advantages or gradients; names the trajectory."""


class PartialStep(MillraceError):
    """A training step failed after some of its updates were written. The weights belong to no version and are given
    up; the job resumes from its last checkpoint."""
