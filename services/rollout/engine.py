"""The protocol of an engine: it generates samples, and receives weights meanwhile.

An engine is one class in a folder of `services/rollout/engines`. What it needs of the engine library is imported inside
the class's methods, so that importing its module costs nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.contracts.v1 import common_pb2
from millrace.data.model_folder import generation_end_tokens
from millrace.errors import MillraceError
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.spec.pool import Pool, PoolTask
from millrace.wire.arrays import TokenScores
from services.rollout.weights.engine_weights import EngineWeights


class StopReason(Enum):
    """Why a completion ended. The values are those of the protocol buffers."""

    END_OF_TURN = common_pb2.STOP_REASON_END_OF_TURN
    """The model produced an end-of-turn token."""
    STOP_STRING = common_pb2.STOP_REASON_STOP_STRING
    """One of the stop strings appeared."""
    LENGTH = common_pb2.STOP_REASON_LENGTH
    """The response reached its limit, or prompt and response the engine's context."""


@dataclass(frozen=True)
class Sampling:
    """How a completion is sampled."""

    max_response_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weights of `version`."""

    version: Version
    start: int
    end: int


def first_tokens(versions: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `tokens` tokens."""
    return tuple(VersionSpan(v.version, v.start, min(v.end, tokens)) for v in versions if v.start < tokens)


def joined(first: Sequence[VersionSpan], second: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans of a response whose first tokens have the spans `first`, which count from 0, as do those of `second`,
    the tokens after them."""
    spans, start = list(first), first[-1].end if first else 0
    for span in second:
        if spans and spans[-1].version == span.version and span.start == 0:
            spans[-1] = VersionSpan(span.version, spans[-1].start, start + span.end)
        else:
            spans.append(VersionSpan(span.version, start + span.start, start + span.end))
    return tuple(spans)


@dataclass(frozen=True, eq=False)
class Partial:
    """The first tokens of a response that may not be whole."""

    tokens: NDArray[np.int32]
    """[tokens]"""
    logprobs: NDArray[np.float32]
    """[tokens], as in `Completion`: each under the version that sampled it."""
    versions: tuple[VersionSpan, ...]
    """Contiguous, in order, covering every token."""
    experts: NDArray[np.integer] | None = None
    """The experts of each token, as in `Completion`. None if the engine has not reported them yet."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, tokens: int) -> "Partial":
        """Its first `tokens` tokens, without experts."""
        return Partial(self.tokens[:tokens], self.logprobs[:tokens], first_tokens(self.versions, tokens))

    def after(self, tokens: int) -> "Partial":
        """What follows its first `tokens` tokens; spans count from there."""
        spans = [VersionSpan(v.version, max(v.start - tokens, 0), v.end - tokens) for v in self.versions]
        rest = tuple(span for span in spans if span.end > 0)
        return Partial(self.tokens[tokens:], self.logprobs[tokens:], rest, self.experts)


NO_TOKENS = Partial(np.zeros(0, np.int32), np.zeros(0, np.float32), ())


@dataclass(frozen=True)
class ShownImages:
    """The images of a prompt."""

    images: Sequence[Any]
    """Images of Pillow, in the order of their places in the prompt."""
    prompt_tokens: Sequence[int]
    """The prompt's tokens with one for each image."""


class Response:
    """A response from its beginning to its end. Its tokens can be read while it grows."""

    def __init__(self, prefix: Partial = NO_TOKENS, images: ShownImages | None = None) -> None:
        self.images = images
        """The images of its prompt; None if it has none. Only engines that take images get some."""
        self.prefix = prefix
        """What was sampled before, by this engine or another one. The engine continues after it."""
        self.kept = len(prefix)
        """Number of its first tokens that the coordinator keeps, so that another replica can continue it."""
        self.kept_experts = False
        self._read: Callable[[int], Partial] = NO_TOKENS.after

    def shorten(self, tokens: int) -> None:
        """Only the first `tokens` tokens of the prefix are continued."""
        self.prefix = self.prefix.first(tokens)
        self.kept = min(self.kept, tokens)

    def follow(self, read: Callable[[int], Partial]) -> None:
        """Called by the engine that begins to generate. `read(n)`: what it has sampled after the prefix, without the
        first `n` tokens. It is called on the event loop, also after the end."""
        self._read = read

    def after(self, tokens: int) -> Partial:
        """What the response has after its first `tokens` tokens; spans count from there."""
        known = len(self.prefix)
        new = self._read(max(0, tokens - known))
        if tokens >= known:
            return new
        old = self.prefix.after(tokens)
        return Partial(
            np.concatenate([old.tokens, new.tokens]),
            np.concatenate([old.logprobs, new.logprobs]),
            joined(old.versions, new.versions),
            new.experts,
        )


@dataclass(frozen=True)
class CachedPrefix:
    """What an engine had in its cache of keys and values when a request began."""

    tokens: int
    """Tokens of the prompt whose keys and values were there."""
    block: int
    """The cache has prefixes of multiples of this number of tokens only."""
    key: str
    """Differs for keys and values of other weights, of which a request finds none."""
    at: float
    """When the request ended, on the clock `time.monotonic`."""

    @classmethod
    def reported(cls, tokens: int | None, block: int, key: str) -> "CachedPrefix | None":
        """The prefix of a request that has just ended, from the number that its engine reports. None if the engine
        reports none, or keeps no prefixes (`block` is 0)."""
        return None if tokens is None or not block else cls(tokens, block, key, time.monotonic())


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one request."""

    tokens: NDArray[np.int32]
    """[tokens], the end-of-turn token included if the model produced one."""
    logprobs: NDArray[np.float32]
    """[tokens], nats, in the distribution that was sampled from: after temperature, top-k and top-p. For greedy samples
    in the model's own distribution (temperature 1)."""
    versions: tuple[VersionSpan, ...]
    """Contiguous, in order, covering every token."""
    stop_reason: StopReason
    text: str
    """The text without special tokens, and without the stop string that ended it."""
    experts: NDArray[np.integer] | None = None
    """Experts that the routers chose, if the job replays routers: [tokens, layers with experts, experts a token] for
    the first tokens of prompt and response. The last token may be missing: no expert may have seen it."""
    waited_s: float = 0.0
    """Seconds that it waited in the engine for one of its slots."""
    carried: int = 0
    """Number of its first tokens that were not generated by this call."""
    cached: CachedPrefix | None = None
    """What was in the engine's cache of its prompt; None if the engine keeps no prefixes, or does not tell."""

    @property
    def partial(self) -> Partial:
        """The tokens, and what is known of them."""
        return Partial(self.tokens, self.logprobs, self.versions, self.experts)

    def continuing(self, prefix: Partial) -> "Completion":
        """The completion that begins with `prefix`, after which the tokens of this one were sampled. `text` and
        `experts` are those of the whole already."""
        experts = self.experts
        if experts is not None and prefix.experts is not None:
            experts = np.concatenate([prefix.experts, experts[len(prefix.experts) :]])
        return replace(
            self,
            tokens=np.concatenate([prefix.tokens, self.tokens]),
            logprobs=np.concatenate([prefix.logprobs, self.logprobs]),
            versions=joined(prefix.versions, self.versions),
            experts=experts,
            carried=len(prefix),
        )


@dataclass(frozen=True)
class Load:
    """Number of samples in the engine now."""

    running: int
    waiting: int


@dataclass(frozen=True)
class EngineStats:
    """What the scheduler of the engine library reports."""

    running: int
    waiting: int
    """Requests in its queue."""
    cache_used: float
    """Part of its cache of keys and values that running requests hold, 0 to 1. An engine without a cache of fixed size
    gives the part of its slots that is in use."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all requests so far; 0 if the engine has no cache of prompts."""
    cached_prompt_tokens: int = 0
    """The part of these tokens whose keys and values were in the cache."""
    preempted: int = 0
    """Requests so far that lost their keys and values because the cache was full, and were computed again; 0 if the
    engine does not report it. Those that a publication had computed again are not among them."""


class Engine(EngineWeights, Protocol):
    """Generates samples, and receives weights meanwhile. All methods are called on one event loop and do not block
    it.

    What fails for good raises EngineDied, and the process ends. For weights see `EngineWeights`.
    """

    name: str
    release: str
    """Release of the engine library."""
    dtype: str
    """Dtype of the parameters, as torch names it. Valid once the engine has started, as is `capacity`."""
    capacity: int
    """Samples that it runs at once."""

    async def start(self, spec: JobSpec) -> None:
        """Loads the job's model, with weights of no meaning. Raises InvalidJob for what the job asks wrongly."""

    async def stop(self) -> None:
        """Ends every process and thread of the engine. Idempotent."""

    async def forget_job(self) -> None:
        """Makes a running engine ready for another job that needs the same one: no version is in place, requests in
        flight end, and caches of prompts and images are empty."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response | None = None
    ) -> Completion:
        """One completion. It continues the prefix of `response`, if there is one, and is the same as if it had never
        been interrupted: the prefix counts for every limit and stop string. Cancelling the call aborts the request
        inside the engine. Raises InvalidState if no version is in place, or none was for a while since the call
        began."""

    def load(self) -> Load:
        """Raises EngineDied if the engine has ended."""

    def stats(self) -> EngineStats | None:
        """Unlike `load`, which counts what the replica has asked for. None if the library has reported nothing
        (yet)."""

    async def finish_batch(self) -> None:
        """Returns when what generates has come to the end of a batch, at once if it has nothing to do. It never
        does if the engine stands still. Raises Unavailable if a worker does not answer in time."""


class EngineDied(MillraceError):
    """The engine's process or thread ended; the replica leaves the fleet and exits."""


def compute_threads() -> int:
    """Threads that an engine computes with on a CPU, unless OMP_NUM_THREADS says otherwise. One core is left to event
    loops and other processes: threads that wait for each other are very slow on a fully loaded host."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def end_of_turn(folder: str, tokenizer: Any, *, trust_remote_code: bool, field: str = "model.path") -> list[int]:
    """Tokens that end a response, the same for every engine: those of the folder's config, of its
    generation_config.json, and the tokenizer's. Raises InvalidJob about `field`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokens = set(generation_end_tokens(Path(folder), field))
    for part in (config, config.get_text_config()):
        named = getattr(part, "eos_token_id", None)
        tokens |= {named} if isinstance(named, int) else set(named or ())
    return sorted(tokens | {tokenizer.eos_token_id} - {None})


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
    """Size of the policy's vocabulary: log-probabilities are over this many first tokens. None: over all tokens."""
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
    """Longest sequence, tokens; None if the model does not say."""
    vocabulary: int
    """Tokens have ids below this."""

    async def start(self, model: PoolModel) -> None:
        """Loads the model. Raises InvalidJob if it cannot do what the pool is for."""

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

    async def reply(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        """A reply; its tokens are of version 0. Cancelling the call aborts it. Raises InvalidState if the engine
        stops."""
