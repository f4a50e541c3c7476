"""What a job asks of its pools: the scores of a teacher for sampled tokens, and those of a reward model for answers."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from millrace.admission.choices import teacher_top
from millrace.contracts.methods import ScoringRpc
from millrace.contracts.trajectories import TOKEN_BYTES, sampled_spans
from millrace.contracts.v1 import common_pb2, scoring_pb2
from millrace.data.row import PromptRow
from millrace.errors import InvalidRequest
from millrace.rewards import PoolTerm
from millrace.spec import JobSpec
from millrace.wire.arrays import TokenScores
from services.rollout.pools.client import PoolClient
from services.rollout.scoring.scored import Answer, Scored


@dataclass(frozen=True)
class Teacher:
    """Scores trajectories by the pool of the job's `algorithm.distillation`."""

    client: PoolClient
    top: int
    """Number of the most likely tokens that are asked for in each place."""

    @classmethod
    def of_job(cls, spec: JobSpec, pools: Mapping[str, PoolClient]) -> Self | None:
        """The job's teacher; None if it has none. `pools`: by name."""
        if (distillation := spec.algorithm.distillation) is None:
            return None
        return cls(pools[distillation.pool], teacher_top(spec) or 0)

    async def scores(
        self, prompt: bytes, trajectories: Sequence[common_pb2.Trajectory]
    ) -> list[common_pb2.TokenScores]:
        """The scores of the sampled tokens of each trajectory. `prompt`: tokens of the group's prompt, int32.

        Waits while the pool has no replica. Raises Unavailable if replicas fail, InvalidRequest if the teacher
        refuses the tokens, and ValueError for scores that cannot be used.
        """
        found = await asyncio.gather(*(self._score(batch) for batch in self._batches(prompt, trajectories)))
        return [scores for batch in found for scores in batch]

    def _batches(
        self, prompt: bytes, trajectories: Sequence[common_pb2.Trajectory]
    ) -> Iterator[list[scoring_pb2.TokenSequence]]:
        """The sequences in requests of as many tokens as the pool takes at once."""
        batch: list[scoring_pb2.TokenSequence] = []
        tokens, most = 0, self.client.pool.batch_tokens
        for trajectory in trajectories:
            sequence = _sequence(prompt, trajectory)
            length = len(sequence.tokens) // TOKEN_BYTES
            if batch and tokens + length > most:
                yield batch
                batch, tokens = [], 0
            batch.append(sequence)
            tokens += length
        if batch:
            yield batch

    async def _score(self, sequences: Sequence[scoring_pb2.TokenSequence]) -> list[common_pb2.TokenScores]:
        request = scoring_pb2.ScoreTokensRequest(
            job_id=self.client.job_id, pool=self.client.pool.name, sequences=sequences, top=self.top
        )
        scores = list((await self.client.call(ScoringRpc.ScoreTokens, request)).scores)
        if len(scores) != len(sequences):
            raise InvalidRequest(f"{len(scores)} scores came back for {len(sequences)} sequences.")
        for sequence, one in zip(sequences, scores, strict=True):
            TokenScores.of(one, sum(span.end - span.start for span in sequence.scored), self.top)
        return scores


def _sequence(prompt: bytes, trajectory: common_pb2.Trajectory) -> scoring_pb2.TokenSequence:
    """The whole trajectory, of which the sampled tokens are scored."""
    before = trajectory.prompt_tokens or prompt
    sequence, first = scoring_pb2.TokenSequence(tokens=before + trajectory.tokens), len(before) // TOKEN_BYTES
    for start, end in sampled_spans(trajectory):
        sequence.scored.add(start=first + start, end=first + end)
    return sequence


CONVERSATIONS = 16
"""Conversations of one request."""


@dataclass(frozen=True)
class PoolScorer:
    """Scores answers by the reward model of a pool."""

    term: PoolTerm
    client: PoolClient

    async def score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of the answers to the row's prompt, in their order. Raises Unavailable if replicas of the pool
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
