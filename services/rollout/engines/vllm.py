"""vLLM behind the engine protocol: AsyncLLM, the same adapter for the CPU build and the GPU build.

An engine is several processes (EngineCore, one Worker a rank) below this one. The weights live in the workers, where
`weight_receiver.WeightReceiver` receives them beside generation.
"""

import asyncio
import gc
import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import structlog

from millrace.errors import InvalidJob, InvalidState, PublicationFailed, Unavailable
from millrace.ids import Version
from millrace.spec import JobSpec
from millrace.spec.rollout import CachePolicy
from millrace.weights.boxes import Boxes
from millrace.weights.manifest import Manifest
from services.rollout.delivery import Delivery, mode_of, stages
from services.rollout.engines import vllm_options
from services.rollout.engines.engine import (
    EngineDied,
    Load,
    Probe,
    Reception,
    Sample,
    Sampling,
    StopReason,
    Swap,
    VersionSpan,
    compute_threads,
)
from services.rollout.engines.vllm_versions import VersionMarks
from services.rollout.lifeline import kill_descendants, own_descendants

log = structlog.get_logger(__name__)
RPC_S = 60.0
"""For one call into the workers. None of them waits for anything but its own work."""
WORKERS_END_S = 0.5


def probe() -> Probe:
    found = vllm_options.release()
    if importlib.util.find_spec("vllm") is None or not found:
        return Probe(False, "", "vLLM is not installed: install millrace[cpu-vllm] or millrace[gpu-vllm].")
    if missing := vllm_options.plugin_missing():
        return Probe(False, found, missing)
    return Probe(True, found, vllm_options.release_warning(found))


class VllmEngine:
    name = "vllm"

    def __init__(self) -> None:
        self.release = vllm_options.release()
        self.device = ""
        self.world_size = 0
        self.dtype = ""
        self.capacity = 0
        self._llm: Any = None
        # The kernel ends a child with the thread that made it: this one lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._version: Version | None = None
        self._marks: VersionMarks | None = None
        self._delivery: Delivery | None = None
        self._staged = True
        self._paused = 0.0
        self._end_of_turn: list[int] = []
        self._tokenizer: Any = None
        self._cores: set[int] = set()

    async def start(self, spec: JobSpec) -> None:
        if warning := vllm_options.release_warning(self.release):
            log.warning(warning)
        own_descendants()
        _set_environment()
        self._llm = await asyncio.get_running_loop().run_in_executor(self._thread, self._build, spec)
        config = self._llm.vllm_config
        cache = config.cache_config
        # A sample in flight holds half of its longest length on average.
        fitting = 2 * (cache.num_gpu_blocks or 0) * cache.block_size // config.model_config.max_model_len
        self.capacity = max(1, min(config.scheduler_config.max_num_seqs, fitting))
        self.world_size = config.parallel_config.world_size
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")

    def _build(self, spec: JobSpec) -> Any:
        """Starts the engine's processes and returns the AsyncLLM. Takes seconds to minutes; runs in `_thread`."""
        from vllm.outputs import CompletionOutput
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        vllm_options.check_api(AsyncLLM)
        if "weight_versions" not in CompletionOutput.__dataclass_fields__:
            self._marks = VersionMarks()
        self.device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
        if current_platform.is_cpu():
            # Nothing is compiled in eager mode but one helper of the sampler, at 15 s for every start.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            os.environ.setdefault("OMP_NUM_THREADS", str(compute_threads()))
        others = {child.pid for child in psutil.Process().children()}
        try:
            arguments = vllm_options.engine_arguments(spec)
            config = arguments.create_engine_config()
            vllm_options.check_model(config)
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        except (ValueError, TypeError, OSError) as error:
            what = f"vLLM refused model.path {spec.model.path} with rollout.engine_options: {error}."
            raise InvalidJob(what, "mend the named option; vLLM's log above says more.") from error
        except (RuntimeError, MemoryError) as error:
            what = f"vLLM did not start with {spec.model.path}: {error}."
            raise Unavailable(what, "its log above names the cause; memory and CUDA devices first.") from error
        self._cores = {child.pid for child in psutil.Process().children()} - others
        self._tokenizer = llm.get_tokenizer()
        self._end_of_turn = _end_of_turn(llm.model_config, self._tokenizer)
        return llm

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._shut_down)
            # Its destructor would run at the interpreter's end, when what it calls is gone.
            await asyncio.sleep(0)
            gc.collect()
        self._thread.shutdown(wait=False)

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        # EngineCore waits seconds for workers that hold nothing worth waiting for.
        cores = [child for child in psutil.Process().children() if child.pid in self._cores]
        hurry = threading.Timer(WORKERS_END_S, _kill_below, [cores])
        hurry.start()
        llm.shutdown()
        hurry.cancel()

    def load(self) -> Load:
        if self._llm is not None and self._llm.errored:
            raise EngineDied(f"vLLM's engine process ended: {self._llm.dead_error}")
        running = min(len(self._running), self.capacity)
        return Load(running, len(self._running) - running)

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = f"sample-{next(self._numbers)}"
        prompt = {
            "type": "token",
            "prompt_token_ids": list(prompt_tokens),
            # Blocks of an older version are not this request's to reuse.
            "cache_salt": str(self._version),
        }
        self._running.add(request_id)
        if self._marks is not None:
            self._marks.began(request_id, self._version)
        try:
            final = None
            async for output in self._llm.generate(prompt, self._parameters(sampling), request_id):
                final = output
            return await self._sample(request_id, final)
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended: {error}") from error
        finally:
            self._running.discard(request_id)
            if self._marks is not None:
                self._marks.forget(request_id)

    def _parameters(self, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response_tokens,
            stop=list(sampling.stop),
            stop_token_ids=self._end_of_turn,
            logprobs=0,
            flat_logprobs=True,
            # Text token by token is needed to see stop strings only.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def _sample(self, request_id: str, final: Any) -> Sample:
        if final is None or final.outputs[0].finish_reason not in ("stop", "length"):
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise InvalidState(f"vLLM ended sample {request_id} with {reason}.", "the prompt is issued again.")
        output = final.outputs[0]
        tokens = np.asarray(output.token_ids, dtype=np.int32)
        if isinstance(output.stop_reason, str):
            stop_reason, text = StopReason.STOP_STRING, output.text
        else:
            stop_reason = StopReason.LENGTH if output.finish_reason == "length" else StopReason.END_OF_TURN
            text = await asyncio.to_thread(self._decode, output.token_ids)
        return Sample(
            tokens=tokens,
            logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
            versions=self._spans(request_id, output, len(tokens)),
            stop_reason=stop_reason,
            text=text,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _spans(self, request_id: str, output: Any, tokens: int) -> tuple[VersionSpan, ...]:
        if self._marks is not None:
            return self._marks.spans(request_id, tokens)
        return tuple(VersionSpan(Version(int(s.version)), s.start, s.end) for s in output.weight_versions)

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        answers = await self._rpc("millrace_describe", manifest.to_proto().SerializeToString())
        return [Boxes.decode(answer["boxes"]) for answer in answers]

    async def prepare(self, delivery: Delivery) -> None:
        await self.abort_receive()
        answers = await self._rpc("millrace_prepare", delivery.encode())
        if delivery.sides is not None:
            self._staged = stages(delivery, all(answer["fits"] for answer in answers))
            await self._rpc("millrace_ready", delivery.encode(), self._staged)
        self._delivery = delivery

    async def begin_receive(self) -> None:
        if self._delivery is not None and self._delivery.sides is not None and not self._staged:
            self._paused = time.perf_counter()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._rpc("millrace_begin")

    @property
    def half_written(self) -> bool:
        return bool(self._paused)

    async def received(self) -> Reception:
        wait_s = 0.005
        answers = await self._rpc("millrace_progress")
        while not all(answer["done"] for answer in answers):
            await asyncio.sleep(wait_s)
            wait_s = min(0.1, 1.5 * wait_s)
            answers = await self._rpc("millrace_progress")
        if self._delivery is not None and self._delivery.sides is not None:
            return Reception(
                (),
                wire_s=max(answer["wire_s"] for answer in answers),
                checksum_s=max(answer["checksum_s"] for answer in answers),
                contents=tuple((content, value) for answer in answers for content, value in answer["contents"]),
            )
        if any(answer["checksums"] != answers[0]["checksums"] for answer in answers):
            raise PublicationFailed("the engine's workers received different bytes.", "publish again.")
        return Reception(
            checksums=tuple(answers[0]["checksums"]),
            wire_s=max(answer["wire_s"] for answer in answers),
            checksum_s=max(answer["checksum_s"] for answer in answers),
        )

    async def commit(self, version: Version, cache_policy: CachePolicy) -> Swap:
        started = self._paused or time.perf_counter()
        # With clear_cache, requests in flight lose their keys and values and are prefilled again under the new weights.
        await self._llm.pause_generation(mode="keep", clear_cache=cache_policy == "recompute")
        whole = False
        try:
            answers = await self._rpc("millrace_apply")
            self._check_placed(answers)
            await self._label(version)
            whole = True
        finally:
            if not whole:
                await self._drop_version()
            self._paused = 0.0
            await self._llm.resume_generation()
        sharded = self._delivery is not None and self._delivery.sides is not None
        through_loader = len(self._delivery.manifest.tensors) if self._delivery else 0
        return Swap(
            apply_s=max(answer["apply_s"] for answer in answers),
            compare_s=max(answer["compare_s"] for answer in answers),
            pause_s=time.perf_counter() - started,
            loader_tensors=max(answer.get("loader_tensors", through_loader) for answer in answers),
            loader_bytes=max(answer.get("loader_bytes", 0) for answer in answers),
            staging_bytes=max(answer.get("staging_bytes", 0) for answer in answers),
            mode=mode_of(self._staged or not sharded),
        )

    async def abort_receive(self) -> None:
        if self._llm is not None:
            await self._rpc("millrace_abort")
            if self._paused:
                self._paused = 0.0
                await self._drop_version()
                await self._llm.resume_generation()

    async def _drop_version(self) -> None:
        """No version is in place: what runs is of no use."""
        self._version = None
        await self._llm.abort(list(self._running))

    def _check_placed(self, answers: list[dict[str, Any]]) -> None:
        nowhere = set.intersection(*(set(answer["unplaced"]) for answer in answers))
        if nowhere:
            what = f"the engine's loader placed nothing of {', '.join(sorted(nowhere)[:5])}."
            raise PublicationFailed(what, "leave tied copies out of the manifest; load one model folder everywhere.")

    async def _label(self, version: Version) -> None:
        if self._marks is not None:
            await self._marks.swapped(self._llm, version)
        else:
            await self._llm.update_weight_version(str(version))
        self._version = version

    async def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """One call into every worker; raises PublicationFailed for the first that failed."""
        try:
            answers = await asyncio.wait_for(self._llm.collective_rpc(method, args=arguments), RPC_S)
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer {method} within {RPC_S:g} s.") from error
        for answer in answers:
            if "failed" in answer:
                raise PublicationFailed(answer["failed"], answer["mend"])
        return list(answers)


def _kill_below(cores: list[psutil.Process]) -> None:
    for core in cores:
        if core.is_running():
            kill_descendants(core)


def _set_environment() -> None:
    """Before vLLM is imported; what the user set stays."""
    if missing := vllm_options.plugin_missing():
        raise InvalidState(missing, "")
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas that share a host would all bind to its first cores
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None and vllm_options.PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{vllm_options.PLUGIN}".lstrip(",")


def _end_of_turn(config: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: those of the model folder's generation config, and the tokenizer's."""
    named = config.try_get_generation_config().get("eos_token_id") or []
    tokens = {named} if isinstance(named, int) else set(named)
    return sorted(tokens | {tokenizer.eos_token_id} - {None})
