"""Deaths of members that worked for a job, when they are its fault, and how many of its prompts were dropped because
their reward or environment failed.

A job ends only itself. Each death is charged to the job whose work the member held: to its place (the address, which
the next life of the process has too) and to each prompt that it held. A completed group settles the deaths of all
places, since the job's work can be done; a prompt's own deaths are settled by its own group. A trained step settles the
last words too. What nothing settles is forgotten a day after the last death. If a budget is spent, the job fails, or
the prompt is dropped, with the last words of who died.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from millrace.drops import DropReason
from millrace.rest import LedgerView

PLACE_BUDGET = 3
"""Deaths of one place with no group of the job completed in between."""
PROMPT_BUDGET = 3
"""Deaths of members that held a prompt, before it is dropped."""
SUSPECT_AFTER = 2
"""Deaths after which a prompt is leased alone, so that the one that kills can be found among those leased with it."""
TRAINER_BUDGET = 5
"""Times that the trainer is lost at one step; once more and the job fails."""
COUNT_S = 86_400
"""Seconds after the last death in which the deaths of a job count."""
REASONS = (DropReason.REWARD_FAILED, DropReason.ENVIRONMENT_FAILED)
LEAST = 32
"""Prompts, and at least two steps' worth, before a share of them is judged."""
REPORTED_FROM = 0.02
"""A job is warned from this share on."""


@dataclass(frozen=True)
class Deaths:
    """The deaths that are charged to a job since it last made progress."""

    of_place: Mapping[str, int]
    """Number by place."""
    words: str = ""
    """What the last of the dead said."""

    def spent(self, places: Collection[str]) -> int:
        """How often in a row the place with the most deaths died, if that spends the budget, and so do all the other
        `places`, those of the members that are there now; 0 otherwise. While one of them may still do the work, the
        fault is in the places that died."""
        most = max(self.of_place.values(), default=0)
        if most < PLACE_BUDGET or any(self.of_place.get(place, 0) < PLACE_BUDGET for place in places):
            return 0
        return most

    def of_pool(self, pool: str) -> "Deaths":
        """The deaths of the replicas of one pool."""
        return Deaths({place: n for place, n in self.of_place.items() if place.startswith(f"{pool} ")}, self.words)


def place_of(pool: str, address: str) -> str:
    """Names the place of a member."""
    return f"{pool} {address}"


def lua_budgets() -> str:
    """The budgets of prompts, and how long deaths count, as Lua's variables."""
    return f"local PROMPT_BUDGET, SUSPECT_AFTER, DEATHS_COUNT_S = {PROMPT_BUDGET}, {SUSPECT_AFTER}, {COUNT_S}\n"


@dataclass(frozen=True)
class Failures:
    """Counts of the prompts whose answers were scored, or were to be."""

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
