"""The phases of a publication as a transition table. Pure and torch-free.

A member keeps one `PublicationState`. Calls may be repeated (a restarted coordinator repeats those whose end it does
not know) and may come late (from before an abort). The table says which calls are done, ignored as repeated, or
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from millrace.contracts.v1 import weights_pb2
from millrace.errors import Fenced, InvalidState
from millrace.ids import Epoch, JobId, Version


class Phase(Enum):
    NONE = "none"
    """No publication is in progress."""
    PREPARE = "prepare"
    """Manifest, plan and rendezvous are agreed on."""
    TRANSFER = "transfer"
    """Bytes are being sent."""
    VERIFY = "verify"
    """Every checksum was compared."""
    COMMIT = "commit"
    """The new version is in place: a receiver serves it, the sender is finished."""


NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.NONE: frozenset({Phase.PREPARE}),
    Phase.PREPARE: frozenset({Phase.TRANSFER, Phase.NONE}),
    Phase.TRANSFER: frozenset({Phase.VERIFY, Phase.NONE}),
    Phase.VERIFY: frozenset({Phase.COMMIT, Phase.NONE}),
    Phase.COMMIT: frozenset({Phase.PREPARE}),
}
"""For each phase those that may follow it. NONE is an abort: possible until COMMIT; after COMMIT only a newer
publication may begin."""


@dataclass(frozen=True, order=True)
class PublicationId:
    """Identifies a publication. Ordered by epoch, version and attempt; ids of different jobs are not compared."""

    epoch: Epoch
    version: Version
    attempt: int
    job: JobId

    @classmethod
    def from_proto(cls, ref: weights_pb2.PublicationRef) -> "PublicationId":
        return cls(Epoch(ref.epoch), Version(ref.version), ref.attempt, JobId(ref.job_id))

    def to_proto(self) -> weights_pb2.PublicationRef:
        return weights_pb2.PublicationRef(job_id=self.job, version=self.version, epoch=self.epoch, attempt=self.attempt)

    @property
    def key(self) -> str:
        """The id as text; it also names the publication's communicator."""
        return f"{self.job}/{self.version}/{self.epoch}/{self.attempt}"


@dataclass(frozen=True)
class PublicationState:
    """A member's state: the newest publication that it knows and the phase that this publication has reached."""

    publication: PublicationId | None = None
    phase: Phase = Phase.NONE

    def advance(self, publication: PublicationId, phase: Phase) -> "PublicationState":
        """The state after `phase`. The same object where that phase was reached before: the caller does nothing then.

        Raises Fenced for a publication older than the newest known one, InvalidState if a phase was left out.
        """
        current = self.publication
        if current is not None and current.job == publication.job and publication < current:
            raise Fenced(f"publication {publication.key} is older than {current.key}.", "publish the current version.")
        if publication != current:
            return self._begin(publication, phase)
        if phase is self.phase or (self.phase is Phase.COMMIT and phase is not Phase.PREPARE):
            return self
        if phase not in NEXT[self.phase]:
            what = f"publication {publication.key} is in phase {self.phase.value}; {phase.value} does not follow."
            raise InvalidState(what, "abort it and publish again with a new attempt.")
        return replace(self, phase=phase)

    def _begin(self, publication: PublicationId, phase: Phase) -> "PublicationState":
        if phase is Phase.NONE:
            return self
        if phase is not Phase.PREPARE:
            what = f"publication {publication.key} was never prepared here; {phase.value} does not follow."
            raise InvalidState(what, "prepare it first.")
        return PublicationState(publication, Phase.PREPARE)

    def fail(self) -> "PublicationState":
        """The state after an abort. The publication is remembered, so that its late calls are refused."""
        return replace(self, phase=Phase.NONE)
