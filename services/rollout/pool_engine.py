"""The protocols of the engines of pools. Their models are loaded once and never change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.spec.pool import Pool, PoolTask
from millrace.wire.arrays import TokenScores
from services.rollout.engine import Sample, Sampling


@dataclass(frozen=True)
class PoolModel:
    """What the engine of a pool's replica loads."""

    pool: Pool
    task: PoolTask
    field: str
    """Path of the pool in the job spec: `pools.0`."""
    temperature: float
    """Temperature of the log-probabilities."""
    policy_tokens: int | None
    """Size of the policy's vocabulary: log-probabilities are over so many first tokens. None: over all tokens."""
    longest: int
    """Tokens of the longest prompt and response together."""


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A sequence of tokens, of which some are scored."""

    tokens_t: NDArray[np.int32]
    """[T]"""
    scored_n: NDArray[np.int64]
    """Places of the scored tokens, [N], ascending, each at least 1."""


class PoolEngine(Protocol):
    """Holds the model of a pool. All methods are called on one event loop and do not block it. What fails for good
    raises EngineDied."""

    name: str
    release: str
    """Release of the engine library."""
    device: str
    """Valid once the engine has started, as are those below."""
    world_size: int
    at_once: int
    """Calls that it computes at once. Further ones wait."""
    context: int | None
    """Longest sequence, tokens; None where the model does not say."""
    vocabulary: int
    """Tokens have ids below this."""

    async def start(self, model: PoolModel) -> None:
        """Loads the model. Raises InvalidJob where it cannot do what the pool is for."""

    async def stop(self) -> None:
        """Frees the model. Idempotent."""


class ScoringEngine(PoolEngine, Protocol):
    """Scores sequences."""

    async def score_tokens(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        """The scores of each sequence, with the `top` most likely tokens in each place."""

    async def rewards(self, sequences: Sequence[NDArray[np.int32]]) -> list[float]:
        """The number that the model gives to each sequence, int32 [T]."""


class ReplyEngine(PoolEngine, Protocol):
    """Replies to prompts."""

    async def reply(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        """A reply; its tokens are of version 0. Cancelling the call aborts it. Raises InvalidState where the engine
        stops."""
