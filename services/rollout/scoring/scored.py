"""Scores of answers, and the weighted sum of the scores by several functions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.rewards.outcome import NOT_FINITE, fits


@dataclass(frozen=True)
class Answer:
    """What is scored."""

    text: str
    """The answer; of an episode of several turns the last one."""
    conversation: str = ""
    """All of its episode, as the model saw it."""


@dataclass(frozen=True)
class Scored:
    """The score of one answer."""

    score: float | None
    """A finite number; None if scoring failed."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further values that the reward function returned."""
    seconds: float = 0.0
    failure: str | None = None
    """`timeout after 10 s`, `raised ValueError: ...`, `killed: memory limit 512 MB`, `returned nan`."""


class Weighted(Protocol):
    """A part of a reward."""

    @property
    def name(self) -> str:
        """Name of its score; empty if that is the reward."""

    @property
    def weight(self) -> float:
        """Factor of its score in the reward."""


def summed(terms: Sequence[Weighted], scored: Sequence[Sequence[Scored]]) -> list[Scored]:
    """The reward of each answer from its scores by each of `terms`.

    The score of the only function without a name is the reward. Otherwise the reward is the sum of the scores times
    their weights. Its details hold each score under its function's name, and what else the functions returned; of a key
    that several returned they hold the value of the first. An answer that one function failed on has no reward.
    """
    if len(terms) == 1 and not terms[0].name:
        return list(scored[0])
    return [_sum(terms, of_answer) for of_answer in zip(*scored, strict=True)]


def _sum(terms: Sequence[Weighted], scored: Sequence[Scored]) -> Scored:
    seconds = sum(each.seconds for each in scored)
    total, details, scores = 0.0, dict[str, Any](), dict[str, float]()
    for term, each in zip(terms, scored, strict=True):
        if each.score is None:
            return Scored(None, {}, seconds, f"{term.name} {each.failure}")
        total += term.weight * each.score
        scores[term.name] = each.score
        details = {**each.details, **details}
    if not fits(total):
        return Scored(None, {}, seconds, f"the sum of the scores is {total}, {NOT_FINITE}")
    return Scored(total, {**details, **scores}, seconds)
