"""vLLM as the engine of a pool that replies: a language model with its weights."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.errors import InvalidState
from millrace.ids import Version
from services.rollout.engine import Completion, PoolModel, Sampling, StopReason, VersionSpan, end_of_turn
from services.rollout.engines.vllm.options import is_whole, parameters, stop_reason
from services.rollout.engines.vllm.pools.engine import VllmPoolEngine, pool_arguments

SEQUENCES_ON_CPU = 64


class VllmReplies(VllmPoolEngine):
    """vLLM's AsyncLLM. See `ReplyEngine`."""

    async def start(self, model: PoolModel) -> None:
        """See `PoolEngine`."""
        await super().start(model)
        self._tokenizer = self._llm.get_tokenizer()
        trust, field = model.pool.trust_remote_code, f"{model.field}.path"
        self._end_of_turn = end_of_turn(model.pool.path, self._tokenizer, trust_remote_code=trust, field=field)

    def _arguments(self, model: PoolModel) -> Any:
        return engine_arguments(model)

    async def reply(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        final = await self._last_output(prompt_tokens, parameters(sampling, self._end_of_turn))
        if final is None or not is_whole(final):
            raise InvalidState("vLLM aborted the reply.", "ask again.")
        output = final.outputs[0]
        tokens, ended = np.asarray(output.token_ids, np.int32), stop_reason(output)
        stopped = ended is StopReason.STOP_STRING
        text = output.text if stopped else await asyncio.to_thread(self._text, output.token_ids)
        logprobs, versions = np.asarray(output.logprobs.logprobs, np.float32), VersionSpan(Version(0), 0, len(tokens))
        return Completion(tokens, logprobs, (versions,), ended, text)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def engine_arguments(model: PoolModel) -> Any:
    """AsyncEngineArgs for the model of a pool that replies. Raises InvalidJob for an option that vLLM does not take."""
    from vllm.platforms import current_platform

    defaults: dict[str, Any] = {"enable_prefix_caching": True, "seed": secrets.randbits(31)}
    if current_platform.is_cpu():
        defaults["max_num_seqs"] = SEQUENCES_ON_CPU
    return pool_arguments(model, defaults, {"logprobs_mode": "processed_logprobs"})
