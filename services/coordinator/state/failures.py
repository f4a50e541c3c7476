"""How many of a job's prompts were dropped because their reward or environment failed. Pure."""

from dataclasses import dataclass
from typing import Self

from millrace.drops import DropReason
from millrace.rest import LedgerView

REASONS = (DropReason.REWARD_FAILED, DropReason.ENVIRONMENT_FAILED)
LEAST = 32
"""Prompts, and at least two steps' worth, before a share of them is judged."""
TOLD_FROM = 0.02
"""A job is warned from this share on."""


@dataclass(frozen=True)
class Failures:
    """Of the prompts whose answers were scored, or were to be."""

    failed: int
    scored: int
    """Prompts that have, or had, a group, and those that failed."""

    @classmethod
    def of(cls, ledger: LedgerView) -> Self:
        failed = sum(ledger.reasons.get(reason, 0) for reason in REASONS)
        groups = ledger.generated + ledger.trained + ledger.reasons.get(DropReason.NO_SIGNAL, 0)
        return cls(failed, groups + failed)

    @property
    def share(self) -> float:
        return self.failed / max(1, self.scored)

    def exceed(self, limit: float, per_step: int) -> bool:
        """Whether they are more than the job allows."""
        return self.scored >= max(LEAST, 2 * per_step) and self.share > limit

    def __str__(self) -> str:
        return f"{self.failed} of {self.scored} prompts ({self.share:.0%})"
