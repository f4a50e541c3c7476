"""vLLM as the engine of a pool: log-probabilities of tokens by a language model, as those of a prompt."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from millrace.data.model_folder import context
from millrace.errors import Unavailable, refused
from millrace.spec.pool import PoolTask
from millrace.wire.arrays import TokenScores
from services.rollout.engine import EngineDied, PoolModel, TokenSequence
from services.rollout.engines.vllm.pools.engine import VllmPoolEngine, pool_arguments

EXTENSION = "services.rollout.engines.vllm.worker.ScoringExtension"
PASS_TOKENS = 2048
"""Tokens of one pass: their logits lie in memory at once, in float32, and vLLM keeps no memory for them."""
SEQUENCES = 16
"""Sequences of one pass. More than fill it would only share the cache."""
WORKERS_S = 60.0
"""Longest time until the workers have taken the temperature."""


class VllmScoring(VllmPoolEngine):
    """vLLM's AsyncLLM. See `ScoringEngine`."""

    async def start(self, model: PoolModel) -> None:
        """See `PoolEngine`."""
        if model.task is not PoolTask.LOGPROBS:
            reason = f"replicas with the engine vllm give {PoolTask.LOGPROBS}, not {model.task}"
            raise refused(f"{model.field}.name", model.pool.name, reason, "start them with --engine transformers.")
        await super().start(model)
        assert self.context is not None
        self.context -= 1  # vLLM samples a token after the prompt
        try:
            async with asyncio.timeout(WORKERS_S):
                await self._llm.collective_rpc("millrace_score", args=(model.temperature, model.policy_tokens))
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer within {WORKERS_S:g} s.") from error

    def _arguments(self, model: PoolModel) -> Any:
        return engine_arguments(model)

    async def score_tokens(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        """See `ScoringEngine`. vLLM computes the sequences side by side."""
        return list(await asyncio.gather(*(self._score(each, top) for each in sequences)))

    async def _score(self, sequence: TokenSequence, top: int) -> TokenScores:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        final = await self._last_output(sequence.tokens_t.tolist(), asked)
        if final is None or final.prompt_logprobs is None:
            raise EngineDied("vLLM ended a request without log-probabilities.")
        return token_scores(final.prompt_logprobs, sequence.scored_n, top)

    async def rewards(self, sequences: Sequence[NDArray[np.int32]]) -> NoReturn:
        """See `ScoringEngine`. `start` refuses models that would be asked for rewards."""
        raise NotImplementedError


def token_scores(prompt_logprobs: Any, scored_n: NDArray[np.int64], top: int) -> TokenScores:
    """The scores in the places `scored_n`, [N], of a prompt. `prompt_logprobs` are vLLM's FlatLogprobs: nothing for the
    first token; for each further one itself, and then the `top` most likely ones."""
    width = 1 + top
    tokens_tk = np.asarray(prompt_logprobs.token_ids, np.int32).reshape(-1, width)[scored_n - 1]
    logprobs_tk = np.asarray(prompt_logprobs.logprobs, np.float32).reshape(-1, width)[scored_n - 1]
    return TokenScores(
        np.ascontiguousarray(logprobs_tk[:, 0]),
        np.ascontiguousarray(tokens_tk[:, 1:]),
        np.ascontiguousarray(logprobs_tk[:, 1:]),
    )


def engine_arguments(model: PoolModel) -> Any:
    """AsyncEngineArgs for the model of a pool that scores. Raises InvalidJob for an option that vLLM does not take."""
    longest, positions = model.longest + 1, context(Path(model.pool.path))
    defaults: dict[str, Any] = {
        "max_model_len": longest if positions is None else min(longest, positions),
        "max_num_batched_tokens": max(min(model.pool.batch_tokens, PASS_TOKENS), SEQUENCES),
        "max_num_seqs": SEQUENCES,
        # A prompt whose log-probabilities are asked for is computed whole.
        "enable_prefix_caching": False,
    }
    return pool_arguments(model, defaults, {"max_logprobs": -1, "worker_extension_cls": EXTENSION})
