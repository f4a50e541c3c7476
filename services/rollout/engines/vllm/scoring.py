"""vLLM as the engine of a pool: log-probabilities of tokens by a language model, as those of a prompt."""

import asyncio
import dataclasses
import gc
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import structlog
from numpy.typing import NDArray

from millrace.data.model_folder import context
from millrace.engines import ENGINES
from millrace.engines.vllm import SET_BY_REPLICAS
from millrace.errors import InvalidJob, Unavailable, refused
from millrace.spec.pools.pool import PoolTask
from millrace.wire.arrays import TokenScores
from services.rollout.engine import EngineDied
from services.rollout.engines.options import has_latents, mistake_in
from services.rollout.engines.vllm.environment import before_start, set_cpu_environment
from services.rollout.engines.vllm.options import CPU_KV_CACHE_BYTES, ON_LATENTS
from services.rollout.engines.vllm.processes import shut_down, start_errors
from services.rollout.pools.engine import PoolModel, TokenSequence

log = structlog.get_logger(__name__)
SOFTWARE = ENGINES["vllm"].software
EXTENSION = "services.rollout.engines.vllm.worker.ScoringExtension"
PASS_TOKENS = 2048
"""Tokens of one pass: their logits lie in memory at once, in float32, and vLLM keeps no memory for them."""
SEQUENCES = 16
"""Sequences of one pass. More than fill it would only share the cache."""
WORKERS_S = 60.0
"""Longest time until the workers have taken the temperature."""
RESERVED = {
    "model": "path",
    "tokenizer": "path",
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    **dict.fromkeys((*SET_BY_REPLICAS, "max_logprobs", "runner", "convert"), ""),
}
"""Options that a pool cannot set, with the field of the pool that has the same effect, or empty."""


class VllmScoring:
    """vLLM's AsyncLLM. See `ScoringEngine`."""

    name = "vllm"

    def __init__(self) -> None:
        self.release = SOFTWARE.release
        self.device = ""
        self.world_size = 1
        self.at_once = SEQUENCES
        self.context: int | None = None
        self.vocabulary = 0
        self._llm: Any = None
        # The kernel ends a child with the thread that started it: this thread lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._numbers = itertools.count()
        self._others: set[BaseProcess] = set()
        """Children of this process that are none of vLLM's."""

    async def start(self, model: PoolModel) -> None:
        """See `ScoringEngine`."""
        if model.task is not PoolTask.LOGPROBS:
            reason = f"replicas with the engine vllm give {PoolTask.LOGPROBS}, not {model.task}"
            raise refused(f"{model.field}.name", model.pool.name, reason, "start them with --engine transformers.")
        if warning := SOFTWARE.release_warning(self.release):
            log.warning(warning)
        self._others = before_start()
        self._llm = await asyncio.get_running_loop().run_in_executor(self._thread, self._build, model)
        config = self._llm.vllm_config
        self.world_size = config.parallel_config.world_size
        self.context = config.model_config.max_model_len - 1  # vLLM samples a token after the prompt
        self.vocabulary = config.model_config.get_vocab_size()
        try:
            async with asyncio.timeout(WORKERS_S):
                await self._llm.collective_rpc("millrace_score", args=(model.temperature, model.policy_tokens))
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer within {WORKERS_S:g} s.") from error

    def _build(self, model: PoolModel) -> Any:
        """Starts the engine's processes and returns the AsyncLLM. Takes seconds to minutes; runs in `_thread`."""
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self.device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
        if current_platform.is_cpu():
            set_cpu_environment()
        with start_errors(f"{model.field}.path", model.pool.path, f"{model.field}.engine_options"):
            config = engine_arguments(model).create_engine_config()
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def stop(self) -> None:
        """See `ScoringEngine`."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.get_running_loop().run_in_executor(self._thread, shut_down, llm, self._others)
            del llm
        # AsyncLLM's destructor would run at the interpreter's end, when what it calls is gone.
        await asyncio.sleep(0)
        gc.collect()
        self._thread.shutdown(wait=False)

    async def score_tokens(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        """See `ScoringEngine`. vLLM computes the sequences side by side."""
        return list(await asyncio.gather(*(self._score(each, top) for each in sequences)))

    async def _score(self, sequence: TokenSequence, top: int) -> TokenScores:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        asked = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = {"type": "token", "prompt_token_ids": sequence.tokens_t.tolist()}
        final = None
        try:
            async for output in self._llm.generate(prompt, asked, f"scores-{next(self._numbers)}"):
                final = output
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
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
    """AsyncEngineArgs for a pool's model. Raises InvalidJob for an option that vLLM does not take."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    pool, known = model.pool, {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    field = f"{model.field}.engine_options"
    reserved = {name: instead and f"{model.field}.{instead}" for name, instead in RESERVED.items()}
    found = (mistake_in("vllm", name, reserved, known, "AsyncEngineArgs", field) for name in pool.engine_options)
    if mistakes := [mistake for mistake in found if mistake is not None]:
        raise InvalidJob.of(mistakes)
    longest, positions = model.longest + 1, context(Path(pool.path))
    arguments: dict[str, Any] = {
        "max_model_len": longest if positions is None else min(longest, positions),
        "max_num_batched_tokens": max(min(pool.batch_tokens, PASS_TOKENS), SEQUENCES),
        "max_num_seqs": SEQUENCES,
        "disable_log_stats": True,
        # A prompt whose log-probabilities are asked for is computed whole.
        "enable_prefix_caching": False,
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        if has_latents(pool.path):
            arguments |= ON_LATENTS
    arguments |= pool.engine_options
    return AsyncEngineArgs(
        **arguments
        | {
            "model": pool.path,
            "trust_remote_code": pool.trust_remote_code,
            "dtype": pool.dtype,
            "max_logprobs": -1,
            "worker_extension_cls": EXTENSION,
            "generation_config": "vllm",
            "enable_log_requests": False,
        }
    )
