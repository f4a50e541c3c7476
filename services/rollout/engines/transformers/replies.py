"""Hugging Face Transformers as the engine of a pool that replies: a language model with its weights."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from millrace.errors import InvalidState
from millrace.ids import Version
from millrace.validation import limits
from millrace.validation.mistakes import options as checked_options
from services.rollout.engine import Completion, PoolModel, Sampling, end_of_turn
from services.rollout.engines.endings import Endings
from services.rollout.engines.transformers import scoring
from services.rollout.engines.transformers.decode_thread import DecodeThread


class Options(scoring.Options):
    """`engine_options` of a pool that replies, for this engine."""

    max_num_seqs: int = Field(16, ge=1, le=65_536)
    """Replies decoded at once."""


class TransformersReplies(scoring.TransformersPool):
    """See `ReplyEngine`."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0
        self._thread = DecodeThread()

    async def start(self, model: PoolModel) -> None:
        """See `PoolEngine`."""
        self._thread.start(await asyncio.to_thread(self._build, model))

    def _build(self, model: PoolModel) -> Any:
        """Loads the model; its decode loop."""
        from transformers import AutoTokenizer

        from services.rollout.engines.transformers.decoding import DecodeLoop

        pool = model.pool
        options = checked_options(Options, pool.engine_options, f"{model.field}.engine_options")
        self._load(model, options)
        self.at_once = options.max_num_seqs
        tokenizer = AutoTokenizer.from_pretrained(pool.path, trust_remote_code=pool.trust_remote_code)
        trust, field = pool.trust_remote_code, f"{model.field}.path"
        ends = frozenset(end_of_turn(pool.path, tokenizer, trust_remote_code=trust, field=field))
        endings = Endings(tokenizer, ends, self.context or limits.MOST_TOKENS)
        decode_loop = DecodeLoop(self._model, endings, options.max_num_seqs, secrets.randbits(60))
        decode_loop.set_version(Version(0))  # the weights of the folder, for ever
        return decode_loop

    async def stop(self) -> None:
        """See `PoolEngine`."""
        await self._thread.stop()
        self._model = None

    async def reply(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self._thread.complete(prompt_tokens, sampling)
        if completion is None:
            raise InvalidState("the reply was aborted.", "ask again.")
        return completion
