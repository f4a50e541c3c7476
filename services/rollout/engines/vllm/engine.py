"""vLLM behind the engine protocol: AsyncLLM, the same adapter for the CPU build and the GPU build.

AsyncLLM starts several processes: an EngineCore for each data-parallel rank, and its Workers. The weights are in the
workers, where `worker.WorkerExtension` receives them during generation.
"""

import asyncio
import gc
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from millrace.engines import ENGINES
from millrace.errors import BadRow, InvalidState
from millrace.ids import Version
from millrace.megatron.architectures import read_shape
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.wire.address import host_address
from services.rollout.engine import (
    NO_TOKENS,
    CachedPrefix,
    Completion,
    EngineDied,
    EngineStats,
    Load,
    Partial,
    Response,
    Sampling,
    ShownImages,
    StopReason,
    VersionSpan,
    end_of_turn,
    first_tokens,
)
from services.rollout.engines.adapter import AdapterShape, adapter_shape, check_placed
from services.rollout.engines.endings import Endings, StopSearch
from services.rollout.engines.versioned import VersionedEngine, samples_that_fit
from services.rollout.engines.vllm import options as vllm_options
from services.rollout.engines.vllm.adapter import lora_request
from services.rollout.engines.vllm.cpu_weights import read_images_without_torchvision
from services.rollout.engines.vllm.environment import before_start, set_cpu_environment
from services.rollout.engines.vllm.options import is_whole, parameters, stop_reason
from services.rollout.engines.vllm.processes import kill_engine, shut_down, start_errors
from services.rollout.engines.vllm.schedulers import RequestPlaces, SchedulerStats, VllmWorkers
from services.rollout.engines.vllm.versions import VersionMarks
from services.rollout.nodes.leader import Leader, build_on_nodes
from services.rollout.nodes.place import EngineStart

log = structlog.get_logger(__name__)
Spans = tuple[VersionSpan, ...]
SOFTWARE = ENGINES["vllm"].software


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
        self._stats = SchedulerStats()
        self._places = RequestPlaces(1, 0, 0, 0)
        self._paused = self._stands = False
        """Whether a pause was ordered, and whether every scheduler said that it stands still."""
        self._marks: VersionMarks | None = None
        self._states: dict[str, Any] = {}
        """What vLLM knows of each request that runs, as far as somebody has looked."""
        self._end_of_turn: list[int] = []
        self._replayed: list[int] | None = None
        """Layers whose experts are reported; None if the job does not ask for them."""
        self._others: set[BaseProcess] = set()
        """Child processes that vLLM did not start."""
        self._adapter: AdapterShape | None = None
        """The adapter of every request; None if replicas get whole weights."""
        self._lora_request: Any = None
        self._trains_tower = False

    async def start(self, spec: JobSpec) -> None:
        if warning := SOFTWARE.release_warning(self.release):
            log.warning(warning)
        self._others = before_start()
        place = await self._workers.listen(host_address() if self._nodes is not None else "")
        end = partial(kill_engine, self._others)
        self._llm = await build_on_nodes(self._nodes, place, self._thread, partial(self._build, spec), end)
        self._workers.use(self._llm)
        config = self._llm.vllm_config
        cache = config.cache_config
        tokens, longest = (cache.num_gpu_blocks or 0) * cache.block_size, config.model_config.max_model_len
        ranks = config.parallel_config.data_parallel_size
        self.capacity = samples_that_fit(ranks * config.scheduler_config.max_num_seqs, tokens, longest)
        if cache.enable_prefix_caching:
            self._cache_block = getattr(cache, "cache_hit_alignment_tokens", None) or cache.block_size
        blocks = tokens // self._cache_block if self._cache_block else 0
        self._places = RequestPlaces(ranks, self._cache_block, blocks, spec.rollout.samples_per_prompt)
        self.world_size = ranks * config.parallel_config.world_size
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._trains_tower = spec.trainer.train_tower
        unplaced = await self._workers.connect(place, spec, self._adapter, self.world_size)
        if self._adapter is not None:
            check_placed(self._adapter, SOFTWARE.title, unplaced)

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
            read_images_without_torchvision()
        with start_errors("model.path", spec.model.path, "rollout.engine_options"):
            self._adapter = adapter_shape(spec)
            arguments = vllm_options.engine_arguments(spec, self._adapter, start)
            config = arguments.create_engine_config()
            vllm_options.check_model(config)
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=False)
        self._stats.attach(llm, others=not arguments.disable_log_stats)
        if self._marks is not None:
            self._marks.attach(llm)
        tokenizer = llm.get_tokenizer()
        self._lora_request = None if self._adapter is None else lora_request()
        trust = spec.model.trust_remote_code
        self._end_of_turn = end_of_turn(spec.model.path, tokenizer, trust_remote_code=trust)
        self._endings = Endings(tokenizer, frozenset(self._end_of_turn), config.model_config.max_model_len)
        self._replays = spec.algorithm.router_replay
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
        return self._stats.last if self._running else self._stats.idle

    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._replays and sampling.stop:
            response.shorten(0)  # vLLM reports experts only of requests that it ends itself: see `_last_output`
        request_id, prefix, key = f"sample-{next(self._numbers)}", response.prefix, self._cache_key
        prompt_and_prefix = [*prompt_tokens, *prefix.tokens.tolist()]
        prompt = {
            "type": "token",
            "prompt_token_ids": prompt_and_prefix,
            # This request must not reuse cache blocks of an older version.
            "cache_salt": key,
        }
        if response.images is not None:
            prompt = await self._with_images(prompt, response.images, prefix)
        asked = parameters(sampling, self._end_of_turn, carried=len(prefix))
        self._running.add(request_id)
        rank = self._places.begin(prompt_and_prefix)
        if self._marks is not None:
            self._marks.began(request_id, self._version)
        response.follow(partial(self._so_far, request_id))
        try:
            search = StopSearch(self._endings, sampling, prefix)
            asking = self._llm.generate(
                prompt, asked, request_id, lora_request=self._lora_request, data_parallel_rank=rank
            )
            final, spans = await self._last_output(request_id, asking, search)
            if self._marks is not None:
                self._marks.ended(request_id)
            completion = await self._sample(request_id, final, search.stopped, spans, sampling, response)
            if key == self._cache_key:
                self._places.computed(rank, [*prompt_tokens, *completion.tokens.tolist()])
            cached = CachedPrefix.reported(final.num_cached_tokens, self._cache_block, key)
            return replace(completion, cached=cached)
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
        finally:
            self._running.discard(request_id)
            self._states.pop(request_id, None)
            if self._places.end(rank):
                self._stats.rests(rank)
            if self._marks is not None:
                self._marks.forget(request_id)

    async def _with_images(self, prompt: dict[str, Any], shown: ShownImages, prefix: Partial) -> Any:
        """What vLLM makes of a prompt with images. Raises BadRow if it sees other tokens in it than those of
        `prompt`, which are trained."""
        short = {
            "prompt_token_ids": [*shown.prompt_tokens, *prefix.tokens.tolist()],
            "multi_modal_data": {"image": list(shown.images)},
            "cache_salt": prompt["cache_salt"],
        }
        try:
            (made,) = await self._llm.renderer.render_cmpl_async([short])
        except (ValueError, RuntimeError) as error:
            raise BadRow(f"vLLM refuses the prompt's images: {error}.", "correct the row's images.") from error
        if list(made["prompt_token_ids"]) != prompt["prompt_token_ids"]:
            what = f"vLLM makes {len(made['prompt_token_ids'])} tokens of the prompt and its images, "
            what += f"the processor of the model's folder {len(prompt['prompt_token_ids'])}."
            raise BadRow(what, "correct the row's texts: a special token of images in them has this effect.")
        return made

    async def _last_output(self, request_id: str, asking: Any, search: StopSearch) -> tuple[Any, Spans]:
        """The last output of a request. It is aborted once `search` finds a stop string; with the versions up to there,
        which vLLM does not report of an aborted request."""
        final, spans = None, Spans()
        async with aclosing(asking) as outputs:
            async for output in outputs:
                final = output
                if search.look(output.outputs[0].token_ids):
                    spans = self._spans(request_id, output.outputs[0], search.stopped or 0)
                    if spans:  # otherwise the request has ended meanwhile, and its last output reports them
                        break
        return final, spans

    async def _sample(
        self, request_id: str, final: Any, stopped: int | None, spans: Spans, sampling: Sampling, response: Response
    ) -> Completion:
        """`stopped`: number of its tokens, which have the versions `spans`, that a stop string ends after which vLLM
        did not look for. From here on the response has the tokens from its last output: vLLM has forgotten them."""
        if stopped is None and not is_whole(final):
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise InvalidState(f"vLLM ended sample {request_id} with {reason}.", "the prompt is issued again.")
        output, prefix = final.outputs[0], response.prefix
        tokens = np.asarray(output.token_ids, dtype=np.int32)[:stopped]
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)[: len(tokens)]
        sampled = Partial(
            tokens, logprobs, spans or self._spans(request_id, output, len(tokens)), self._experts(output)
        )
        response.follow(sampled.after)
        ended = stop_reason(output) if stopped is None else StopReason.STOP_STRING
        text = output.text
        if len(prefix) or ended is not StopReason.STOP_STRING:
            whole = [*prefix.tokens.tolist(), *tokens.tolist()]
            text = await asyncio.to_thread(self._endings.text, whole, sampling, ended)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=sampled.versions,
            stop_reason=ended,
            text=text,
            experts=sampled.experts,
        ).continuing(prefix)

    def _state(self, request_id: str) -> Any:
        """What vLLM knows of a request; None before it begins. vLLM forgets it at the end, before the last output is
        here, so it is kept from the first look on."""
        processor = self._llm.output_processor
        for name in processor.external_req_ids.get(request_id, ()):
            if (state := processor.request_states.get(name)) is not None:
                self._states[request_id] = state
        return self._states.get(request_id)

    def _so_far(self, request_id: str, after: int) -> Partial:
        """What a request has sampled, without its first `after` tokens."""
        if (state := self._state(request_id)) is None:
            return NO_TOKENS
        logprobs = state.logprobs_processor.logprobs.logprobs
        end = min(state.detokenizer.num_output_tokens(), len(logprobs))
        if end <= after:
            return NO_TOKENS
        if self._marks is not None:
            spans = self._marks.spans(request_id, end)
        else:
            starts = state.weight_version_starts
            ends = [start for _, start in starts[1:]] + [end]
            spans = tuple(VersionSpan(Version(int(v)), s, e) for (v, s), e in zip(starts, ends, strict=True))
        tokens, scores = state.detokenizer.output_token_ids[after:end], logprobs[after:end]
        known = Partial(np.zeros(end, np.int32), np.zeros(end, np.float32), first_tokens(spans, end)).after(after)
        return Partial(np.asarray(tokens, np.int32), np.asarray(scores, np.float32), known.versions)

    def _experts(self, output: Any) -> Any:
        """The experts of the replayed layers. vLLM reports all layers, those without experts too."""
        if self._replayed is None or output.routed_experts is None:
            return None
        reported = output.routed_experts
        return reported if reported.shape[1] == len(self._replayed) else reported[:, self._replayed]

    def _spans(self, request_id: str, output: Any, tokens: int) -> Spans:
        """The versions of a request's first `tokens` tokens; none if vLLM does not tell them any more, or not yet."""
        if self._marks is not None:
            return self._marks.spans(request_id, tokens)
        if output.weight_versions is None:  # vLLM reports them at the end
            so_far = self._so_far(request_id, 0)
            return so_far.first(tokens).versions if len(so_far) >= tokens else ()
        spans = [VersionSpan(Version(int(s.version)), s.start, s.end) for s in output.weight_versions]
        return first_tokens(spans, tokens)

    # What VersionedEngine asks of its subclasses.

    def _started(self) -> bool:
        return self._llm is not None

    async def _pause(self, cache_policy: CachePolicy) -> None:
        # With clear_cache, requests in flight lose their keys and values and are prefilled again under the new weights.
        # AsyncLLM.pause_generation does the same and then sleeps 20 ms, by which the pause would be longer.
        clear = cache_policy == "recompute"
        if clear:
            await self._llm.renderer.clear_mm_cache_async()
            self._stats.cleared(len(self._running))
        self._paused, self._stands = True, False
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear)
        self._stands = True

    async def _resume(self) -> None:
        if not self._paused:
            return  # data-parallel ranks wait for each other as they go on, and one may compute meanwhile
        if not self._stands:  # a pause was given up; vLLM refuses to go on before it has come to it
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._llm.resume_generation()
        self._paused = False

    def _last_token_s(self) -> float:
        return self._stats.last_step_s

    async def _end_requests(self) -> None:
        await self._llm.abort(list(self._running))

    async def _label(self, version: Version, cache_key: str) -> None:
        self._places.forget()
        if self._trains_tower:  # vLLM keeps features of images by the images' hashes alone, whatever the cache policy
            await self._llm.reset_encoder_cache()
        if self._marks is not None:
            await self._marks.swapped(version)
        else:
            await self._llm.update_weight_version(str(version))
