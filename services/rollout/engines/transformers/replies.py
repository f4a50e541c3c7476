"""Hugging Face Transformers as the engine of a pool that replies: a language model with its weights."""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from millrace.data.model_folder import context
from millrace.engines import ENGINES
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


class TransformersReplies:
    """A Hugging Face language model in this process. See `ReplyEngine`."""

    name = "transformers"

    def __init__(self) -> None:
        self.release = ENGINES["transformers"].software.release
        self.device = ""
        self.world_size = 1
        self.at_once = 0
        self.context: int | None = None
        self.vocabulary = 0
        self._model: Any = None
        self._thread = DecodeThread()

    async def start(self, model: PoolModel) -> None:
        """See `PoolEngine`."""
        self._thread.start(await asyncio.to_thread(self._build, model))

    def _build(self, model: PoolModel) -> Any:
        """Loads the model; its decode loop."""
        from transformers import AutoTokenizer

        from services.rollout.engines.transformers.decoding import DecodeLoop
        from services.rollout.engines.transformers.model import device_name, load

        pool = model.pool
        options = checked_options(Options, pool.engine_options, f"{model.field}.engine_options")
        self._model = load(model, options.device, options.attn_implementation)
        self.device = device_name(self._model)
        self.at_once = options.max_num_seqs
        self.context = context(Path(pool.path))
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
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
