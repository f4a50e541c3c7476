"""vLLM's AsyncLLM with the model of a pool and its weights."""

import asyncio
import dataclasses
import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from millrace.engines import ENGINES
from millrace.engines.vllm import SET_BY_REPLICAS
from millrace.errors import InvalidJob
from services.rollout.engine import EngineDied, PoolModel
from services.rollout.engines.options import check_tied_head, has_latents, mistake_in
from services.rollout.engines.vllm.environment import before_start, set_cpu_environment
from services.rollout.engines.vllm.options import CPU_KV_CACHE_BYTES, ON_LATENTS, without_broken_fusion
from services.rollout.engines.vllm.processes import shut_down, start_errors

log = structlog.get_logger(__name__)
SOFTWARE = ENGINES["vllm"].software
RESERVED = {
    "model": "path",
    "tokenizer": "path",
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    **dict.fromkeys((*SET_BY_REPLICAS.split(), "data_parallel_size", "max_logprobs", "runner", "convert"), ""),
}
"""Options that a pool cannot set, with the field of the pool that has the same effect, or empty."""


class VllmPoolEngine(ABC):
    """See `PoolEngine`."""

    name = "vllm"

    def __init__(self) -> None:
        self.release = SOFTWARE.release
        self.device = ""
        self.world_size = 1
        self.at_once = 0
        self.context: int | None = None
        self.vocabulary = 0
        self._llm: Any = None
        # The kernel ends a child with the thread that started it: this thread lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._numbers = itertools.count()
        self._others: set[BaseProcess] = set()
        """Child processes that vLLM did not start."""

    async def start(self, model: PoolModel) -> None:
        if warning := SOFTWARE.release_warning(self.release):
            log.warning(warning)
        self._others = before_start()
        self._llm = await asyncio.get_running_loop().run_in_executor(self._thread, self._build, model)
        config = self._llm.vllm_config
        self.world_size = config.parallel_config.world_size
        self.at_once = config.scheduler_config.max_num_seqs
        self.context = config.model_config.max_model_len
        self.vocabulary = config.model_config.get_vocab_size()

    @abstractmethod
    def _arguments(self, model: PoolModel) -> Any:
        """AsyncEngineArgs. Raises InvalidJob for an option that vLLM does not take."""

    def _build(self, model: PoolModel) -> Any:
        """Starts the engine's processes and returns the AsyncLLM. Takes seconds to minutes; runs in `_thread`."""
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self.device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
        if current_platform.is_cpu():
            set_cpu_environment()
        with start_errors(f"{model.field}.path", model.pool.path, f"{model.field}.engine_options"):
            check_tied_head(model)
            config = self._arguments(model).create_engine_config()
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def _last_output(self, prompt_tokens: Sequence[int], asked: Any) -> Any:
        """What vLLM gives last for a prompt with these SamplingParams; None for nothing. Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt, final = {"type": "token", "prompt_token_ids": list(prompt_tokens)}, None
        try:
            async for output in self._llm.generate(prompt, asked, f"request-{next(self._numbers)}"):
                final = output
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
        return final

    async def stop(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.get_running_loop().run_in_executor(self._thread, shut_down, llm, self._others)
            del llm
        # AsyncLLM's destructor would run at the interpreter's end, when what it calls is gone.
        await asyncio.sleep(0)
        gc.collect()
        self._thread.shutdown(wait=False)


def pool_arguments(model: PoolModel, defaults: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
    """AsyncEngineArgs for a pool's model. The pool's options take the place of `defaults`, and cannot name what is
    `fixed`. Raises InvalidJob for an option that vLLM does not take."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    pool, known = model.pool, {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    field = f"{model.field}.engine_options"
    reserved = {name: instead and f"{model.field}.{instead}" for name, instead in RESERVED.items()}
    found = (mistake_in("vllm", name, reserved, known, "AsyncEngineArgs", field) for name in pool.engine_options)
    if mistakes := [mistake for mistake in found if mistake is not None]:
        raise InvalidJob.of(mistakes)
    arguments: dict[str, Any] = {**defaults, "disable_log_stats": True}
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        if has_latents(pool.path):
            arguments |= ON_LATENTS
    set_here = {
        "model": pool.path,
        "trust_remote_code": pool.trust_remote_code,
        "dtype": pool.dtype,
        "generation_config": "vllm",
        "enable_log_requests": False,
    }
    return without_broken_fusion(AsyncEngineArgs(**arguments | pool.engine_options | set_here | dict(fixed)))
