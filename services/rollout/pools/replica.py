"""One replica of a pool: the model that it holds, and the requests that it answers. The model reads conversations by
its own chat template and tokens."""

import asyncio
import inspect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
from jinja2 import TemplateError
from numpy.typing import NDArray

from millrace import hub
from millrace.admission.pools import pool_tokenizer
from millrace.contracts.v1 import rollout_pb2
from millrace.data.chat import Tokenizer
from millrace.data.model_folder import vocabulary
from millrace.errors import InvalidJob, InvalidRequest, InvalidState, NotFound, refused, wrong_value
from millrace.ids import JobId, MemberId
from millrace.spec import JobSpec, received
from millrace.spec.pool import PoolTask
from millrace.validation import limits
from millrace.wire.arrays import TokenScores
from services.rollout.dialects.requests import Refusals, Refused
from services.rollout.dialects.turns import SampledTurn
from services.rollout.engine import (
    EngineDied,
    Load,
    PoolEngine,
    PoolModel,
    ReplyEngine,
    Sampling,
    ScoringEngine,
    TokenSequence,
)
from services.rollout.engines import create_replying, create_scoring, import_errors, import_transformers
from services.rollout.engines.options import files_by_content, weight_files
from services.rollout.member.member import FleetMember

REFUSALS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What tokenizers and chat templates raise for conversations that they cannot make into tokens."""


@dataclass(frozen=True)
class Conversation:
    """Messages to which a model replies."""

    messages: Sequence[Mapping[str, Any]]
    """The content of each as text."""
    sampling: Sampling
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template."""


def tokens_of(prompt: Any, answer: str, tokenizer: Tokenizer, options: Mapping[str, Any]) -> NDArray[np.int32] | str:
    """The tokens of a conversation, int32 [T], or why there are none. `prompt` is a list of messages, to which the
    answer is added as the assistant's, or plain text that the answer follows."""
    try:
        if isinstance(prompt, str):
            tokens = list(tokenizer.encode(prompt + answer))
        else:
            messages = [*prompt, {"role": "assistant", "content": answer}]
            tokens = _templated(messages, tokenizer, options, reply=False)
    except REFUSALS as error:
        return f"the reward model's tokenizer refuses the conversation: {error}"
    return np.asarray(tokens, np.int32) if tokens else "the conversation has no tokens"


def prompt_of(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    """The tokens after which the model replies to the messages. Raises one of REFUSALS."""
    return _templated(messages, tokenizer, options, reply=True)


def _templated(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: Mapping[str, Any], *, reply: bool
) -> list[int]:
    arguments = {**options, "add_generation_prompt": reply, "tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(list(messages), **arguments))


log = structlog.get_logger(__name__)
WAITING = 4
"""Requests for replies that may run and wait, times those that run at once."""


class PoolReplica(FleetMember):
    """Configured by the coordinator. From then on it answers calls."""

    def __init__(self, member_id: MemberId, pool: str, engine_name: str, engine_release: str) -> None:
        super().__init__(member_id, engine_name, engine_release, pool)
        self.job_id = ""
        self._tokens = 0
        self._engine: PoolEngine | None = None
        self._model: PoolModel | None = None
        self._files: object = None
        """State of the model's files when they were loaded."""
        self._tokenizer: Any = None
        self._template_options: dict[str, Any] = {}
        self._calls = 0
        self._replies = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()

    async def configure(self, job_id: JobId, spec_json: str) -> rollout_pb2.ConfigureRolloutResponse:
        """Loads the pool's model for a job, unless it is loaded. Raises InvalidJob, InvalidState while draining,
        EngineDied."""
        started = time.monotonic()
        async with self._turn:
            spec = await asyncio.to_thread(hub.local, received(spec_json), pool=self.pool)
            if self.draining.is_set():
                raise InvalidState(f"{self.member_id} drains.", "configure another replica.")
            self.job_id = ""
            try:
                kept = await self._hold(_pool_model(spec, self.pool), spec)
            except Exception as error:
                self.state, self.failure = rollout_pb2.ENGINE_STATE_FAILED, str(error)
                await self._stop_engine()
                raise
            assert self._engine is not None and self._model is not None
            self.job_id, self.state, self.failure = job_id, rollout_pb2.ENGINE_STATE_SERVING, ""
            self._template_options = spec.data.chat_template_options
            log.info("configured for a pool", job=job_id, pool=self.pool, engine=self._engine.name)
            return rollout_pb2.ConfigureRolloutResponse(
                world_size=self._engine.world_size,
                dtype=self._model.pool.dtype,
                seconds=time.monotonic() - started,
                kept_engine=kept,
            )

    async def _hold(self, model: PoolModel, spec: JobSpec) -> bool:
        """Has the engine hold the model, and checks it against the job. Whether the engine held it already: a folder
        whose files have changed is another model."""
        await asyncio.to_thread(import_transformers)
        tokenizer = await asyncio.to_thread(pool_tokenizer, spec.model, model.pool, model.task, f"{model.field}.path")
        files = await asyncio.to_thread(_files, model.pool.path)
        kept = self._engine is not None and (self._model, self._files) == (model, files)
        if not kept:
            await self._stop_engine()
            self.state, self.failure = rollout_pb2.ENGINE_STATE_STARTING, ""
            self._engine = _created(self.engine_name, model.task)
            with import_errors(self.engine_name):
                await self._engine.start(model)
            self._model, self._files = model, files
        self._tokenizer = tokenizer
        assert self._engine is not None
        context = self._engine.context
        if model.task is PoolTask.LOGPROBS and context is not None and context < model.longest:
            reason = f"has positions for {context} tokens, and prompt and response may have {model.longest}"
            raise refused(f"{model.field}.path", model.pool.path, reason, "give a model with a longer context.")
        return kept

    async def score_tokens(
        self, job_id: str, pool: str, sequences: Sequence[TokenSequence], top: int
    ) -> list[TokenScores]:
        """The scores of token sequences. Raises InvalidState, InvalidRequest, EngineDied."""
        with self._call(job_id, pool, PoolTask.LOGPROBS) as held:
            engine = cast(ScoringEngine, held)
            self._check([sequence.tokens_t for sequence in sequences], engine)
            if top > engine.vocabulary:
                raise InvalidRequest(f"top: {top}: the model has {engine.vocabulary} tokens.", "ask for fewer.")
            scores = await engine.score_tokens(sequences, top)
            self._tokens += sum(len(sequence.tokens_t) for sequence in sequences)
            return scores

    async def rewards(self, job_id: str, pool: str, conversations: Sequence[tuple[Any, str]]) -> list[float | str]:
        """The reward of each conversation, a prompt and an answer; or why it has none. Raises as `score_tokens`."""
        with self._call(job_id, pool, PoolTask.REWARDS) as held:
            engine = cast(ScoringEngine, held)
            found: list[float | str] = [""] * len(conversations)
            usable: dict[int, NDArray[np.int32]] = {}
            for place, (prompt, answer) in enumerate(conversations):
                tokens = await asyncio.to_thread(tokens_of, prompt, answer, self._tokenizer, self._template_options)
                if isinstance(tokens, str):
                    found[place] = tokens
                elif engine.context is not None and len(tokens) > engine.context:
                    found[place] = f"{len(tokens)} tokens, more than the {engine.context} that the reward model takes"
                else:
                    usable[place] = tokens
            self._check(list(usable.values()), engine, of_request=False)
            for place, reward in zip(usable, await engine.rewards(list(usable.values())), strict=True):
                found[place] = reward if np.isfinite(reward) else f"the reward model gave {reward}"
            self._tokens += sum(map(len, usable.values()))
            return found

    @property
    def context(self) -> int | None:
        """Longest prompt and reply together, tokens; None if no model says."""
        return self._engine.context if self._engine is not None else None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def check_replies(self) -> None:
        """Raises Refused if this replica does not reply, or not now."""
        if self._model is None or not self.job_id:
            what = f"{self.member_id} of the pool {self.pool} is not ready."
            raise Refused(Refusals.UNAVAILABLE, what, "ask again, or ask another replica.")
        if self._model.task is not PoolTask.REPLIES:
            what = f"the model of the pool {self.pool} gives {self._model.task}, not {PoolTask.REPLIES}."
            raise Refused(Refusals.UNKNOWN, what, "ask a pool that a judge of the job names.")

    async def reply(self, conversation: Conversation) -> SampledTurn:
        """The model's reply. Raises Refused, InvalidState, EngineDied."""
        self.check_replies()
        assert self._engine is not None and self._model is not None
        if self._calls >= (most := self._engine.at_once * WAITING):
            raise Refused(Refusals.FULL, f"{most} requests run and wait at {self.member_id}.", "ask again.")
        limit_s = self._model.pool.timeout_s
        with self._call(self.job_id, self.pool, PoolTask.REPLIES) as held:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._reply(conversation, cast(ReplyEngine, held))
            except TimeoutError as error:
                what = f"the reply took longer than the {limit_s:g} s that the pool {self.pool} gives a request."
                raise Refused(Refusals.UNAVAILABLE, what, "ask for a shorter one, or another replica.") from error

    async def _reply(self, conversation: Conversation, engine: ReplyEngine) -> SampledTurn:
        prompt = await asyncio.to_thread(self._prompt, conversation)
        sampling, room = conversation.sampling, (engine.context or limits.MOST_TOKENS) - len(prompt)
        if room <= 0:
            what = f"the conversation has {len(prompt)} tokens, the model takes {engine.context} with its reply."
            raise Refused(Refusals.TOO_LONG, what, "send a shorter one.", "messages")
        began = time.perf_counter()
        most = min(sampling.max_response_tokens, room)
        completion = await engine.reply(prompt, replace(sampling, max_response_tokens=most))
        self._tokens += len(prompt) + len(completion.tokens)
        message = {"role": "assistant", "content": completion.text}
        return SampledTurn(next(self._replies), message, completion, len(prompt), time.perf_counter() - began)

    def _prompt(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation. Raises Refused."""
        options = conversation.template_options
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if taken := next((name for name in options if name in own), None):
            reason = "is not an argument of a chat template"
            raise Refused.of(wrong_value(f"chat_template_kwargs.{taken}", options[taken], reason, "leave it out."))
        try:
            return prompt_of(conversation.messages, self._tokenizer, options)
        except REFUSALS as error:
            what = f"the chat template refuses the messages: {error}."
            raise Refused(Refusals.INVALID, what, "correct the messages.", "messages") from error

    @contextmanager
    def _call(self, job_id: str, pool: str, task: PoolTask) -> Iterator[PoolEngine]:
        """A call that is answered with the engine. Raises InvalidState if this replica cannot."""
        engine, model = self._engine, self._model
        if engine is None or model is None or (self.job_id, self.pool, model.task) != (job_id, pool, task):
            held = f"job {self.job_id}" if self.job_id else "no job"
            what = f"{self.member_id} of the pool {self.pool} is ready for {held}, not to give {task} for {job_id}."
            raise InvalidState(what, "ask another replica of the pool.")
        self._calls += 1
        self._idle.clear()
        try:
            yield engine
        except EngineDied as error:
            self.died_of(error)
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _check(self, sequences: Sequence[NDArray[np.int32]], engine: PoolEngine, *, of_request: bool = True) -> None:
        """Raises InvalidRequest for tokens that the model does not have and for sequences that are too long for it; and
        with `of_request` for more tokens than one request may have."""
        assert self._model is not None
        most = self._model.pool.batch_tokens
        for tokens_t in sequences:
            if len(tokens_t) and not 0 <= int(tokens_t.min()) <= int(tokens_t.max()) < engine.vocabulary:
                span = f"{tokens_t.min()} to {tokens_t.max()}"
                what = f"a sequence has tokens from {span}, the model has {engine.vocabulary}."
                raise InvalidRequest(what, "use a model with the policy's tokenizer.")
            if engine.context is not None and len(tokens_t) > engine.context:
                what = f"a sequence has {len(tokens_t)} tokens, the model takes {engine.context}."
                raise InvalidRequest(what, "use a model with a longer context.")
        if of_request and len(sequences) > 1 and sum(map(len, sequences)) > most:
            raise InvalidRequest(f"{sum(map(len, sequences))} tokens in a request, at most {most}.", "send fewer.")

    @property
    def loaded_engine(self) -> PoolEngine | None:
        return self._engine

    @property
    def job_name(self) -> str:
        return self.job_id

    @property
    def tokens(self) -> int:
        return self._tokens

    def take_no_work(self) -> None:
        """Takes no new calls; those in progress are answered."""
        self.job_id = ""

    async def finish(self) -> None:
        """Waits until no call is in progress."""
        await self._idle.wait()

    def load(self) -> Load:
        """Calls that are being computed, and that wait."""
        running = min(self._calls, self._engine.at_once if self._engine is not None else 0)
        return Load(running, self._calls - running)

    async def close(self) -> None:
        """Stops the engine."""
        async with self._turn:
            self.job_id = ""
            await self._stop_engine()
        self.usage.stop()

    async def _stop_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine, self._model = self._engine, None, None
            await engine.stop()


def _files(folder: str) -> object:
    """Equal as long as the files of a model folder do not change."""
    return files_by_content(folder), weight_files(folder)


def _created(engine: str, task: PoolTask) -> PoolEngine:
    """An engine for a task. Raises InvalidJob if it is none for that."""
    try:
        return create_replying(engine) if task is PoolTask.REPLIES else create_scoring(engine)
    except NotFound as error:
        raise InvalidJob(error.what, error.fix) from error


def _pool_model(spec: JobSpec, name: str) -> PoolModel:
    """What a replica of the pool has to hold for the job. Raises InvalidJob if the job has no such pool."""
    for number, pool in enumerate(spec.pools):
        for task in spec.pool_tasks(name) if pool.name == name else ():
            size = vocabulary(Path(spec.model.path)) if task is PoolTask.LOGPROBS else None
            longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
            return PoolModel(pool, task, f"pools.{number}", spec.rollout.temperature, size, longest)
    raise InvalidJob(f"pools: the job has no pool {name!r}.", "declare it, or start the replica with another --pool.")
