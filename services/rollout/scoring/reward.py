"""The reward of a job: what its functions give, in their processes, and what is asked of others."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from millrace.data.row import PromptRow
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Answer, Scored, Weighted, summed


class TermScorer(Protocol):
    """A part of the reward that no function of the job gives."""

    @property
    def term(self) -> Weighted:
        """Name and weight of its score."""

    async def score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of the answers to the row's prompt, in their order. It may wait for another service. Raises
        Unavailable where that fails: the group is generated again."""


class RewardScorer:
    """Scores groups by the job's functions and by `others`."""

    def __init__(self, functions: ScoringPool, others: Sequence[TermScorer] = ()) -> None:
        self._functions = functions
        self._others = others

    async def score_group(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The rewards of the answers to one prompt, in their order. Raises Unavailable."""
        if not answers:
            return []
        functions, texts = self._functions, [answer.text for answer in answers]
        by_functions, by_others = await asyncio.gather(
            functions.scores_by_term(row.data_source, texts, row.ground_truth, row.extra_info),
            asyncio.gather(*(other.score(row, answers) for other in self._others)),
        )
        terms: list[Weighted] = [*functions.terms, *(other.term for other in self._others)]
        return summed(terms, [*by_functions, *by_others])
