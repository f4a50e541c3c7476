"""A part of a reward that a pool scores: the number that its model gives to prompt and answer."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.contracts.methods import ScoringRpc
from millrace.contracts.v1 import scoring_pb2
from millrace.data.row import PromptRow
from millrace.errors import InvalidRequest
from millrace.rewards import PoolTerm
from services.rollout.pools.client import PoolClient
from services.rollout.scoring.scored import Answer, Scored

CONVERSATIONS = 16
"""Conversations of one request."""


@dataclass(frozen=True)
class PoolScorer:
    """Scores answers by the reward model of a pool."""

    term: PoolTerm
    client: PoolClient

    async def score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of the answers to the row's prompt, in their order. Raises Unavailable where replicas of the pool
        fail; waits while it has none."""
        batches = [answers[first : first + CONVERSATIONS] for first in range(0, len(answers), CONVERSATIONS)]
        found = await asyncio.gather(*(self._score(row, batch) for batch in batches))
        return [scored for batch in found for scored in batch]

    async def _score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        began, prompt = time.perf_counter(), json.dumps(row.prompt)
        request = scoring_pb2.ScoreConversationsRequest(job_id=self.client.job_id, pool=self.term.pool)
        for answer in answers:
            request.conversations.add(prompt=prompt, answer=answer.text)
        try:
            scores = (await self.client.call(ScoringRpc.ScoreConversations, request)).scores
        except InvalidRequest as error:
            return [Scored(None, {}, time.perf_counter() - began, f"was refused: {error.what}")] * len(answers)
        seconds = time.perf_counter() - began
        if len(scores) != len(answers):
            return [Scored(None, {}, seconds, "gave another number of scores")] * len(answers)
        failures = [f"gave no score: {one.failure}" if one.failure else None for one in scores]
        return [
            Scored(one.reward if failure is None else None, {}, seconds, failure)
            for one, failure in zip(scores, failures, strict=True)
        ]
