"""Errors for a reader: what happened, to whom, and the fix.

Every error that a user or another service may see is a `MillraceError`. On the wire it becomes a gRPC status whose
details are `what`; over REST a problem document with the same two texts. What is wrong with a field that a user wrote
is a `Mistake`, and has one format everywhere: `field: value: why. Fix: what to do.`
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

LONGEST_VALUE = 200
"""Characters of a value that an error shows."""


class MillraceError(Exception):
    """`what` happened (naming field, value, member, version, epoch) and the `fix`: what to do next."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} Fix: {self.fix}" if self.fix else self.what


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in what a user wrote: a job spec, the body of a request, an option of a command."""

    field: str
    """Path of the field, `trainer.optimizer.lr`; empty if no single field is wrong."""
    reason: str
    """Why it is wrong, without a full stop."""
    fix: str
    """What to write instead, with its full stop."""
    value: str = ""
    """What was written, as JSON; empty if the field is missing or unknown."""
    line: int = 0
    """Line of the file that holds the field, or the level above a missing one; 0 if that is unknown."""

    @property
    def what(self) -> str:
        """`field: value: why.`, with the line after the field if it is known."""
        place = f"{self.field} (line {self.line})" if self.line and self.field else self.field
        return f"{': '.join(part for part in (place, self.value, self.reason) if part)}."

    def __str__(self) -> str:
        return f"{self.what} Fix: {self.fix}" if self.fix else self.what


def wrong_value(field: str, value: object, reason: str, fix: str) -> Mistake:
    """The value of `field` is wrong. `reason` comes without a full stop, `fix` with one."""
    return Mistake(field, reason, fix, _as_json(value)[:LONGEST_VALUE])


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, default=str, skipkeys=True)
    except ValueError:
        return "a number of thousands of digits"  # Python refuses to write it out


class InvalidJob(MillraceError):
    """A job spec, or something that it names, cannot be used. Refused at submission."""

    def __init__(self, what: str, fix: str = "", mistakes: Sequence[Mistake] = ()) -> None:
        super().__init__(what, fix)
        self.mistakes = tuple(mistakes) or (Mistake("", what.removesuffix("."), fix),)
        """Everything that is wrong, each with its fix."""
        self.heading = ""
        """The line above the mistakes; empty if there is none."""

    @classmethod
    def of(cls, mistakes: Sequence[Mistake], heading: str = "") -> Self:
        """One error for at least one mistake: a line each, indented under the `heading` if there is one."""
        if len(mistakes) == 1 and not heading:
            return cls(mistakes[0].what, mistakes[0].fix, mistakes)
        indent = "  " if heading else ""
        error = cls("\n".join([*filter(None, [heading]), *(f"{indent}{each}" for each in mistakes)]), "", mistakes)
        error.heading = heading
        return error

    def located(self, line_of: Callable[[str], int]) -> "InvalidJob":
        """The same error with the line of each field, as `line_of` knows it (0: unknown)."""
        if not any(mistake.field for mistake in self.mistakes):
            return self
        found = [replace(mistake, line=mistake.line or line_of(mistake.field)) for mistake in self.mistakes]
        return InvalidJob.of(found, self.heading)


def refused(field: str, value: object, reason: str, fix: str) -> InvalidJob:
    """The error for one field of a job spec with a wrong value. `reason` comes without a full stop, `fix` with one."""
    return InvalidJob.of([wrong_value(field, value, reason, fix)])


class InvalidRequest(MillraceError):
    """A message of another service cannot be read, or a field of it has a wrong value."""


def bad_field(field: str, value: object, reason: str, fix: str) -> InvalidRequest:
    """The error for one field of a message with a wrong value. `reason` comes without a full stop, `fix` with one."""
    return InvalidRequest(wrong_value(field, value, reason, fix).what, fix)


class InvalidState(MillraceError):
    """The request does not fit the state of the object that it names (pausing a finished job)."""


class NotFound(MillraceError):
    """There is no such job, member or lease."""


class Fenced(MillraceError):
    """The caller's fencing token, epoch or version is old: another member has taken over what the caller held."""


class BadRow(MillraceError):
    """A data row, a reward or a tokenizer failed on one prompt. Costs that prompt's group, never the job."""


class PublicationFailed(MillraceError):
    """A publication did not reach every member; `culprits` are the addresses or ids of those that failed."""

    def __init__(self, what: str, fix: str = "", culprits: tuple[str, ...] = ()) -> None:
        super().__init__(what, fix)
        self.culprits = culprits

    def again(self) -> "PublicationFailed":
        """A copy to raise again. An exception that was raised once keeps every variable of the frames it left."""
        return PublicationFailed(self.what, self.fix, self.culprits)


class Unavailable(MillraceError):
    """A service or store that is needed did not answer in time."""


class Untrusted(Unavailable):
    """Two sides do not trust each other: one speaks plaintext, or a certificate is missing, expired, revoked, signed by
    another CA or for another name. It is tried again as what is unavailable is: files of TLS are read when they change.
    """

    def __init__(self, what: str, fix: str = "", fault: str = "") -> None:
        super().__init__(what, fix)
        self.fault = fault
        """A `TlsFault`; empty if the other side says it in words only."""


class NonFinite(MillraceError):
    """NaN or infinity in log-probabilities, rewards, advantages or gradients; names the trajectory."""


class OutOfMemory(MillraceError):
    """A rank of the trainer has no memory left; says what held it. No weight was changed: the step can be repeated."""


class PartialOutOfMemory(OutOfMemory):
    """The same after an update of the step began to write weights. As with PartialStep, the weights are given up."""


class PartialStep(MillraceError):
    """A training step failed after some of its updates were written, or a copy of the state while it was put in place.
    The weights belong to no version and are given up; the job resumes from its last checkpoint."""
