"""vLLM behind the engine protocol: AsyncLLM, the same adapter for the CPU build and the GPU build.

AsyncLLM starts several processes: EngineCore, and one Worker for each rank. The weights are in the workers, where
`worker.WorkerExtension` receives them during generation.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import structlog

from millrace.engines import ENGINES
from millrace.errors import InvalidState, Unavailable
from millrace.ids import Version
from millrace.megatron.architectures import read_shape
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.wire.address import host_address
from services.rollout.engine import (
    Completion,
    EngineDied,
    EngineStats,
    Load,
    Sampling,
    StopReason,
    VersionSpan,
    end_of_turn,
)
from services.rollout.engines.adapter import AdapterShape, adapter_shape, check_placed
from services.rollout.engines.versioned import VersionedEngine, samples_that_fit
from services.rollout.engines.vllm import options as vllm_options
from services.rollout.engines.vllm.adapter import lora_request
from services.rollout.engines.vllm.environment import before_start, set_cpu_environment
from services.rollout.engines.vllm.options import is_whole, parameters, stop_reason
from services.rollout.engines.vllm.processes import kill_engine, shut_down, start_errors
from services.rollout.engines.vllm.versions import VersionMarks
from services.rollout.nodes.leader import Leader
from services.rollout.nodes.place import EngineStart
from services.rollout.weights.worker_messages import Request, decode_reply, encode
from services.rollout.weights.worker_methods import BETWEEN_BATCHES
from services.rollout.weights.worker_rpc import RPC_S, WorkerRpc


class SchedulerStats:
    """Stands where AsyncLLM has its loggers of statistics, and keeps the last numbers."""

    def __init__(self) -> None:
        self.last: EngineStats | None = None
        """None before the first step."""
        self.last_step_s = 0.0
        """When the last step's tokens arrived (time.perf_counter())."""
        self._prompt_tokens = self._cached_prompt_tokens = self._preempted = 0
        self._cleared = self._cleared_left = 0
        """Requests whose keys and values were cleared by a pause; those of them that may not have begun again yet."""
        self._others: Any = None

    @property
    def idle(self) -> EngineStats:
        """The numbers of an engine that has nothing to do."""
        return EngineStats(0, 0, 0.0, self._prompt_tokens, self._cached_prompt_tokens, self._preempted)

    def attach(self, llm: Any, *, others: bool) -> None:
        """Takes the place of the loggers of an AsyncLLM that was built with statistics and has not generated yet.
        `others`: whether the loggers go on, as the job asks for them; otherwise single outputs are not looked at."""
        if others:
            self._others = llm.logger_manager
        else:
            llm.log_stats = llm.output_processor.log_stats = False
        llm.logger_manager = self

    def cleared(self, requests: int) -> None:
        """A pause made all running requests, at most `requests`, give up their keys and values. vLLM preempts them for
        that, and counts them like those for which its cache had no room."""
        self._cleared = self._cleared_left = requests

    def record(self, *arguments: Any, scheduler_stats: Any = None, **named: Any) -> None:
        """Called by AsyncLLM with the outputs of each step."""
        self.last_step_s = time.perf_counter()
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
            if (prompts := scheduler_stats.prefix_cache_stats) is not None:
                self._prompt_tokens += prompts.queries
                self._cached_prompt_tokens += prompts.hits
                self._count_preempted(prompts.preempted_requests, waiting)
            running, used = scheduler_stats.num_running_reqs, float(scheduler_stats.kv_cache_usage)
            self.last = replace(self.idle, running=running, waiting=waiting, cache_used=used)
        if self._others is not None:
            self._others.record(*arguments, scheduler_stats=scheduler_stats, **named)

    def _count_preempted(self, begun_again: int, waiting: int) -> None:
        """`begun_again`: preempted requests that have a slot again since the last step. Those that a pause preempted
        come first, so that none of them is left once nothing waits."""
        by_pause = min(begun_again, self._cleared_left)
        self._preempted += begun_again - by_pause
        self._cleared_left -= by_pause
        if self._cleared_left < self._cleared and waiting == 0:
            self._cleared = self._cleared_left = 0

    def __getattr__(self, name: str) -> Any:
        """What else AsyncLLM calls of its loggers: theirs, or nothing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing if self._others is None else getattr(self._others, name)


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


class VllmWorkers:
    """See `Workers`. vLLM's own call is answered by the thread that generates, between two batches."""

    def __init__(self) -> None:
        self._rpc = WorkerRpc("vLLM")
        self._llm: Any = None

    async def listen(self, host: str = "") -> str:
        """Where the workers are to connect: see `WorkerRpc.listen`."""
        return await self._rpc.listen(host)

    async def connect(
        self, llm: Any, place: str, adapter: AdapterShape | None, workers: int, within_s: float
    ) -> list[list[str]]:
        """Has every worker of `llm`, an AsyncLLM, connect and make a place for `adapter`. Answers, for each worker, the
        names of the layers whose adapter has no place there. Raises Unavailable if one does not connect in time."""
        self._llm = llm
        shape = "" if adapter is None else adapter.encode()
        unplaced = await self._between_batches("millrace_connect", (place, shape), "connect")
        await self._rpc.wait_for_workers(workers, within_s)
        return unplaced

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """See `Workers`."""
        if not paused and method not in BETWEEN_BATCHES:
            return await self._rpc.ask(method, *arguments)
        name = method.__name__
        request = encode(Request(0, name, arguments, paused, float("inf")))
        replies = await self._between_batches("millrace_call", (request,), name)
        return [decode_reply(reply).result(method) for reply in replies]

    async def _between_batches(self, method: str, arguments: tuple[str | bytes, ...], name: str) -> list[Any]:
        """Calls a method of `WorkerExtension` in every worker. `name` is for the error if one does not answer."""
        try:
            async with asyncio.timeout(RPC_S):
                return list(await self._llm.collective_rpc(method, args=arguments))
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer {name} within {RPC_S:g} s.") from error

    async def close(self) -> None:
        """Closes the connections and forgets the AsyncLLM. Idempotent."""
        self._llm = None
        await self._rpc.close()


log = structlog.get_logger(__name__)
SOFTWARE = ENGINES["vllm"].software
CONNECT_S = 30.0
"""Longest time until every worker has connected to the replica."""


class VllmEngine(VersionedEngine):
    """vLLM's AsyncLLM. See `Engine`."""

    name = "vllm"

    def __init__(self, nodes: Leader | None = None) -> None:
        """`nodes`: the other hosts on which the engine lies; None for an engine on this host alone."""
        super().__init__()
        self._nodes = nodes
        self.release = SOFTWARE.release
        self.device = ""
        self.world_size = 0
        self.dtype = ""
        self._llm: Any = None
        # The kernel ends a child with the thread that started it: this thread lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._numbers = itertools.count()
        self._workers: VllmWorkers = VllmWorkers()
        self._scheduler = SchedulerStats()
        self._marks: VersionMarks | None = None
        self._end_of_turn: list[int] = []
        self._replayed: list[int] | None = None
        """Layers whose experts are reported; None if the job does not ask for them."""
        self._others: set[BaseProcess] = set()
        """Child processes that vLLM did not start."""
        self._adapter: AdapterShape | None = None
        """The adapter of every request; None if replicas get whole weights."""
        self._lora_request: Any = None

    async def start(self, spec: JobSpec) -> None:
        if warning := SOFTWARE.release_warning(self.release):
            log.warning(warning)
        self._others = before_start()
        place = await self._workers.listen(host_address() if self._nodes is not None else "")
        self._llm = await self._built(spec, place)
        config = self._llm.vllm_config
        cache = config.cache_config
        tokens, longest = (cache.num_gpu_blocks or 0) * cache.block_size, config.model_config.max_model_len
        self.capacity = samples_that_fit(config.scheduler_config.max_num_seqs, tokens, longest)
        self.world_size = config.parallel_config.world_size
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        unplaced = await self._workers.connect(self._llm, place, self._adapter, self.world_size, CONNECT_S)
        if self._adapter is not None:
            check_placed(self._adapter, SOFTWARE.title, unplaced)

    async def _built(self, spec: JobSpec, place: str) -> Any:
        """The AsyncLLM, once all processes on all nodes have started."""
        loop = asyncio.get_running_loop()
        if self._nodes is None:
            return await loop.run_in_executor(self._thread, self._build, spec, None)
        start = await self._nodes.start(place)
        building = loop.run_in_executor(self._thread, self._build, spec, start)
        return await self._nodes.or_failure(building, lambda: kill_engine(self._others))

    def _build(self, spec: JobSpec, start: EngineStart | None) -> Any:
        """Starts the engine's processes and returns the AsyncLLM. Takes seconds to minutes; runs in `_thread`."""
        from vllm.outputs import CompletionOutput
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import AsyncMPClient

        vllm_options.check_api(AsyncLLM, AsyncMPClient)
        if "weight_versions" not in CompletionOutput.__dataclass_fields__:
            self._marks = VersionMarks()
        self.device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
        if current_platform.is_cpu():
            set_cpu_environment()
        with start_errors("model.path", spec.model.path, "rollout.engine_options"):
            self._adapter = adapter_shape(spec)
            arguments = vllm_options.engine_arguments(spec, self._adapter, start)
            config = arguments.create_engine_config()
            vllm_options.check_model(config)
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=False)
        self._scheduler.attach(llm, others=not arguments.disable_log_stats)
        if self._marks is not None:
            self._marks.attach(llm)
        self._tokenizer = llm.get_tokenizer()
        self._lora_request = None if self._adapter is None else lora_request()
        trust = spec.model.trust_remote_code
        self._end_of_turn = end_of_turn(spec.model.path, self._tokenizer, trust_remote_code=trust)
        if spec.algorithm.router_replay and (experts := read_shape(Path(spec.model.path)).experts):
            self._replayed = [layer for layer, has in enumerate(experts.layers) if has]
        return llm

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._shut_down)
        if self._nodes is not None:
            await self._nodes.stop()
        await self._workers.close()
        # AsyncLLM's destructor would run at the interpreter's end, when what it calls is gone.
        await asyncio.sleep(0)
        gc.collect()
        self._thread.shutdown(wait=False)

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        shut_down(llm, self._others)

    def load(self) -> Load:
        if self._llm is not None and self._llm.errored:
            raise EngineDied(f"vLLM's engine process ended: {self._llm.dead_error}")
        return super().load()

    def stats(self) -> EngineStats | None:
        """See `Engine`. vLLM tells nothing while it has nothing to do."""
        return self._scheduler.last if self._running else self._scheduler.idle

    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = f"sample-{next(self._numbers)}"
        prompt = {
            "type": "token",
            "prompt_token_ids": list(prompt_tokens),
            # This request must not reuse cache blocks of an older version.
            "cache_salt": self._cache_key,
        }
        asked = parameters(sampling, self._end_of_turn)
        self._running.add(request_id)
        if self._marks is not None:
            self._marks.began(request_id, self._version)
        try:
            final = None
            asking = self._llm.generate(prompt, asked, request_id, lora_request=self._lora_request)
            async for output in asking:
                final = output
            if self._marks is not None:
                self._marks.ended(request_id)
            return await self._sample(request_id, final)
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
        finally:
            self._running.discard(request_id)
            if self._marks is not None:
                self._marks.forget(request_id)

    async def _sample(self, request_id: str, final: Any) -> Completion:
        if not is_whole(final):
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise InvalidState(f"vLLM ended sample {request_id} with {reason}.", "the prompt is issued again.")
        output = final.outputs[0]
        tokens, ended = np.asarray(output.token_ids, dtype=np.int32), stop_reason(output)
        stopped = ended is StopReason.STOP_STRING
        text = output.text if stopped else await asyncio.to_thread(self._decode, output.token_ids)
        return Completion(
            tokens=tokens,
            logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
            versions=self._spans(request_id, output, len(tokens)),
            stop_reason=ended,
            text=text,
            experts=self._experts(output),
        )

    def _experts(self, output: Any) -> Any:
        """The experts of the replayed layers. vLLM reports all layers, those without experts too."""
        if self._replayed is None or output.routed_experts is None:
            return None
        reported = output.routed_experts
        return reported if reported.shape[1] == len(self._replayed) else reported[:, self._replayed]

    def _spans(self, request_id: str, output: Any, tokens: int) -> tuple[VersionSpan, ...]:
        if self._marks is not None:
            return self._marks.spans(request_id, tokens)
        return tuple(VersionSpan(Version(int(s.version)), s.start, s.end) for s in output.weight_versions)

    # What VersionedEngine asks of its subclasses.

    def _started(self) -> bool:
        return self._llm is not None

    async def _pause(self, cache_policy: CachePolicy) -> None:
        # With clear_cache, requests in flight lose their keys and values and are prefilled again under the new weights.
        # AsyncLLM.pause_generation does the same and then sleeps 20 ms, by which the pause would be longer.
        clear = cache_policy == "recompute"
        if clear:
            await self._llm.renderer.clear_mm_cache_async()
            self._scheduler.cleared(len(self._running))
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear)

    async def _resume(self) -> None:
        await self._llm.resume_generation()

    def _last_token_s(self) -> float:
        return self._scheduler.last_step_s

    async def _end_requests(self) -> None:
        await self._llm.abort(list(self._running))

    async def _label(self, version: Version, cache_key: str) -> None:
        if self._marks is not None:
            await self._marks.swapped(version)
        else:
            await self._llm.update_weight_version(str(version))
