"""SGLang behind the engine protocol: its Engine in this process, and a scheduler process for each rank.

The weights are in the schedulers, where `worker.py` receives them during generation. On one host nothing listens on a
network address: SGLang's processes and this one connect over Unix sockets. Over several hosts this process is on node
0, and each node has schedulers of its own.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import structlog

from millrace.engines import ENGINES
from millrace.errors import InvalidState
from millrace.ids import Version
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
    StopReason,
    VersionSpan,
    end_of_turn,
)
from services.rollout.engines.adapter import AdapterShape, adapter_shape, check_placed
from services.rollout.engines.endings import Endings, StopSearch
from services.rollout.engines.lifeline import kill_children, own_descendants
from services.rollout.engines.sglang import options as sglang_options
from services.rollout.engines.sglang.adapter import NAME, lora_reference
from services.rollout.engines.sglang.launch import lives, set_environment, shut_down, start_engine
from services.rollout.engines.sglang.options import MARK
from services.rollout.engines.sglang.worker_methods import SglangMethods
from services.rollout.engines.versioned import VersionedEngine, samples_that_fit
from services.rollout.nodes.leader import Leader, build_on_nodes
from services.rollout.nodes.place import EngineStart
from services.rollout.weights.worker_rpc import SOCKET, WorkerRpc


class SchedulerStats:
    """The numbers of one engine. Unlike SGLang's own metrics they need no `enable_metrics`."""

    def __init__(self) -> None:
        self._reader: Any = None
        self._prompt_tokens = self._cached_prompt_tokens = 0

    def attach(self, manager: Any) -> None:
        """`manager`: the tokenizer manager of an SGLang engine. A release without a reader reports nothing."""
        self._reader = getattr(manager, "load_snapshot_reader", None)

    def answered(self, prompt_tokens: int, meta: dict[str, Any]) -> None:
        """Counts a finished request. `meta`: the `meta_info` of SGLang's answer. Tokens that are prefilled again after
        a pause are not counted again."""
        self._prompt_tokens += prompt_tokens
        self._cached_prompt_tokens += int(meta.get("cached_tokens") or 0)

    @property
    def now(self) -> EngineStats | None:
        """The newest numbers of all schedulers that report some: one for all ranks of a model, or one for each of the
        data-parallel copies, of which `cache_used` is that of the fullest. None before the first snapshot."""
        # The schedulers make an empty snapshot, of time 0, when they start.
        schedulers = [] if self._reader is None else [one for one in self._reader.read_all() if one.timestamp]
        if not schedulers:
            return None
        return EngineStats(
            running=sum(one.num_running_reqs for one in schedulers),
            waiting=sum(one.num_waiting_reqs for one in schedulers),
            cache_used=max(map(_cache_used, schedulers)),
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )


def _cache_used(snapshot: Any) -> float:
    """Share of a scheduler's cache that running requests hold. SGLang rounds `token_usage` to four digits, which hides
    a few samples in a cache of millions of tokens; but it alone is that of the fullest cache of a model that has
    several, as with a sliding window."""
    used: float = snapshot.num_used_tokens / max(1, snapshot.max_total_num_tokens)
    return max(float(snapshot.token_usage), used)


log = structlog.get_logger(__name__)
SOFTWARE = ENGINES["sglang"].software
T = TypeVar("T")
CHECK_EVERY_S = 0.5
"""How often it is checked that SGLang's processes live."""
CONNECT_S = 60.0
"""Longest time from SGLang's start until every scheduler has connected to the replica."""
WARM_UP_REQUESTS = 256
WARM_UP_TOKENS = 48
"""The batch that warms SGLang up: its requests, and the tokens of its longest prompt."""
PAUSES: dict[CachePolicy, str] = {"recompute": "retract", "keep": "in_place"}
"""SGLang's names: requests in flight are prefilled again, or continue with the keys and values that they have."""


class SglangEngine(VersionedEngine):
    """SGLang's Engine. See `Engine`."""

    name = "sglang"

    def __init__(self, nodes: Leader | None = None) -> None:
        """`nodes`: the other hosts on which the engine lies; None for an engine on this host alone."""
        super().__init__()
        self._nodes = nodes
        self._others: set[BaseProcess] = set()
        """Children of this process that are none of SGLang's."""
        self.release = SOFTWARE.release
        self.device = ""
        self.world_size = 0
        self.dtype = ""
        # The kernel ends a child with the thread that started it: this thread lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._engine: Any = None
        self._manager: Any = None
        self._workers: WorkerRpc = WorkerRpc("SGLang")
        self._scheduler = SchedulerStats()
        self._numbers = itertools.count()
        self._context = 0
        self._end_of_turn: list[int] = []
        self._death: asyncio.Future[str]
        """Resolved once a process of SGLang has ended by itself, with how that was noticed."""
        self._watch: asyncio.Task[None] | None = None
        self._adapter: AdapterShape | None = None
        """The adapter of every request; None if replicas get whole weights."""

    async def start(self, spec: JobSpec) -> None:
        if warning := SOFTWARE.release_warning(self.release):
            log.warning(warning)
        own_descendants()
        set_environment()
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        # SGLang's processes send their parent this signal when one of them has failed.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGQUIT, self._lost, "SGLang reported a failure of its processes")
        self._others = set(multiprocessing.active_children())
        os.environ[SOCKET] = await self._workers.listen(host_address() if self._nodes is not None else "")
        self._context = sglang_options.context(spec)
        end = partial(kill_children, self._others)
        await build_on_nodes(self._nodes, os.environ[SOCKET], self._thread, partial(self._build, spec), end)
        self._handle_outputs()
        first, *others = await self._workers.wait_for_workers(self._engine.server_args.tp_size, CONNECT_S)
        self.world_size, self.dtype, self.device = 1 + len(others), first.dtype, first.device
        self.capacity = samples_that_fit(first.max_requests, first.cache_tokens, self._context)
        if not self._engine.server_args.disable_radix_cache:
            self._cache_block = self._engine.server_args.page_size or 1
        if self._adapter is not None:
            unplaced = await self._ask(SglangMethods.add_adapter, self._adapter.encode())
            check_placed(self._adapter, SOFTWARE.title, unplaced)
            await self._manager.lora_registry.register(lora_reference())
        await self._while_alive(self._warm_up())
        self._watch = asyncio.create_task(self._watch_processes(self._engine.get_all_child_pids()))

    async def _warm_up(self) -> None:
        """Runs one large batch of short requests. Otherwise SGLang would compile kernels in the first batches of the
        job, and a publication that waits for the end of such a batch would wait seconds."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        requests, longest = min(self.capacity, WARM_UP_REQUESTS), min(WARM_UP_TOKENS, self._context - 2)
        request = GenerateReqInput(
            input_ids=[[number % WARM_UP_TOKENS] * (1 + number % longest) for number in range(requests)],
            sampling_params={"max_new_tokens": 2, "ignore_eos": True},
            return_logprob=True,
            lora_path=self._lora_path,
        )
        await self._last_output(request)

    @property
    def _lora_path(self) -> str | None:
        """The name by which requests ask SGLang for the adapter."""
        return None if self._adapter is None else NAME

    def _handle_outputs(self) -> None:
        """Starts SGLang's handling of outputs. SGLang would start it with the first request, and handle this process's
        signals too."""
        loop = asyncio.get_running_loop()
        handling = loop.create_task(self._manager.handle_loop())
        handling.add_done_callback(lambda _: self._lost("their outputs are not handled any more"))
        self._manager.event_loop = loop
        self._manager.asyncio_tasks.add(handling)

    def _build(self, spec: JobSpec, start: EngineStart | None) -> None:
        """Starts SGLang's processes. Takes seconds to minutes; runs in `_thread`."""
        engine = start_engine(spec, start)
        self._adapter = adapter_shape(spec)
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._scheduler.attach(self._manager)
        sglang_options.check_model(self._manager.model_config)
        trust = spec.model.trust_remote_code
        self._end_of_turn = end_of_turn(spec.model.path, self._manager.tokenizer, trust_remote_code=trust)
        self._endings = Endings(self._manager.tokenizer, frozenset(self._end_of_turn), self._context)

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.get_running_loop().run_in_executor(self._thread, shut_down, engine)
            for task in list(self._manager.asyncio_tasks):
                task.cancel()
            # Otherwise unsent messages to processes that have ended delay the end of this process.
            for socket in (self._manager.recv_from_detokenizer, self._manager.send_to_scheduler):
                socket.close(linger=0)
        if self._nodes is not None:
            await self._nodes.stop()
        await self._workers.close()
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        self._thread.shutdown(wait=False)

    async def _watch_processes(self, processes: list[int]) -> None:
        while all(lives(pid) for pid in processes):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(CHECK_EVERY_S)
        self._lost(f"{', '.join(str(pid) for pid in processes if not lives(pid))} ended")

    def _lost(self, how: str) -> None:
        if not self._death.done():
            self._death.set_result(how)

    def _check_alive(self) -> None:
        if self._death.done():
            raise EngineDied(f"SGLang's processes: {self._death.result()}.")

    def load(self) -> Load:
        self._check_alive()
        return super().load()

    def stats(self) -> EngineStats | None:
        """See `Engine`. A snapshot may be some steps of decoding old."""
        return self._scheduler.now

    # Generation.

    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        # SGLang aborts every request whose id begins with the given id, so no id may be the beginning of another.
        request_id, prefix, key = f"sample-{next(self._numbers)}.", response.prefix, self._cache_key
        search = StopSearch(self._endings, sampling, prefix)
        tokens = [*prompt_tokens, *prefix.tokens.tolist()]
        request = GenerateReqInput(
            input_ids=tokens,
            sampling_params=self._parameters(len(tokens), len(prefix), sampling),
            return_logprob=True,
            rid=request_id,
            # This request must not reuse keys and values of an older version.
            extra_key=key,
            lora_path=self._lora_path,
            stream=search.needed,
        )
        self._running.add(request_id)
        response.follow(partial(self._so_far, request_id))
        try:
            final = await self._while_alive(self._last_output(request, search))
            completion = await self._sample(request_id, final, search.stopped, sampling, prefix)
            self._scheduler.answered(len(tokens), final["meta_info"])
            cached = CachedPrefix.reported(final["meta_info"].get("cached_tokens"), self._cache_block, key)
            return replace(completion, cached=cached)
        finally:
            self._running.discard(request_id)
            if not self._death.done() and self._engine is not None:
                self._manager.abort_request(rid=request_id)  # does nothing if it has ended

    def _so_far(self, request_id: str, after: int) -> Partial:
        """What a request in flight has sampled, without its first `after` tokens. SGLang reports it every few dozen
        tokens."""
        state = self._manager.rid_to_state.get(request_id)
        if state is None:
            return NO_TOKENS
        marks, scores = state.customized_info_accumulated.get(MARK, []), state.output_token_logprobs_val
        end = min(len(state.output_ids), len(scores), len(marks))
        if end <= after:
            return NO_TOKENS
        tokens, new = np.asarray(state.output_ids[after:end], np.int32), np.asarray(scores[after:end], np.float32)
        return Partial(tokens, new, _spans(marks[after:end]))

    async def _while_alive(self, answer: Coroutine[Any, Any, T]) -> T:
        """Waits for an answer of SGLang. Raises EngineDied once a process of SGLang has ended: it would never come."""
        asking = asyncio.create_task(answer)
        try:
            either: list[asyncio.Future[Any]] = [asking, self._death]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return asking.result()
        finally:
            asking.cancel()

    async def _last_output(self, request: Any, search: StopSearch | None = None) -> Any:
        """The output of one request, or the list of outputs of a batch; None if there was none. A request that is
        streamed has ended once `search` finds a stop string."""
        final = None
        async for output in self._manager.generate_request(request, None):
            final = output
            if search is not None and search.look(output["output_ids"]):
                break
        return final

    def _parameters(self, prompt_tokens: int, carried: int, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": min(sampling.max_response_tokens - carried, self._context - prompt_tokens),
            "stop": None if carried else list(sampling.stop) or None,
            "stop_token_ids": self._end_of_turn,
        }

    async def _sample(
        self,
        request_id: str,
        final: dict[str, Any] | None,
        stopped: int | None,
        sampling: Sampling,
        prefix: Partial,
    ) -> Completion:
        """`stopped`: number of its tokens that a stop string ends after which SGLang did not look for."""
        ended = (final or {}).get("meta_info", {}).get("finish_reason") or {"type": "nothing"}
        if final is None or (stopped is None and ended["type"] not in ("stop", "length")):
            raise InvalidState(f"SGLang ended sample {request_id} with {ended}.", "the prompt is issued again.")
        meta = final["meta_info"]
        tokens = np.asarray(final["output_ids"], dtype=np.int32)[:stopped]
        if stopped is not None or (ended["type"] == "stop" and isinstance(ended.get("matched"), str)):
            reason = StopReason.STOP_STRING
        else:  # SGLang reports an end-of-turn token that is the last one that fits as "length"
            ends = len(tokens) > 0 and int(tokens[-1]) in self._end_of_turn
            reason = StopReason.END_OF_TURN if ends else StopReason.LENGTH
        text = str(final["text"])
        if len(prefix) or not sampling.stop:  # otherwise SGLang has decoded the text already, and cut it
            whole = [*prefix.tokens.tolist(), *tokens.tolist()]
            text = await asyncio.to_thread(self._endings.text, whole, sampling, reason)
        return Completion(
            tokens=tokens,
            logprobs=np.asarray([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)[: len(tokens)],
            versions=_spans(meta[MARK][: len(tokens)]),
            stop_reason=reason,
            text=text,
        ).continuing(prefix)

    # What VersionedEngine asks of its subclasses.

    def _started(self) -> bool:
        return self._engine is not None

    async def _pause(self, cache_policy: CachePolicy) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode=PAUSES[cache_policy]))

    async def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _label(self, version: Version, cache_key: str) -> None:
        await self._ask(SglangMethods.label, int(version), cache_key, paused=True)

    async def _end_requests(self) -> None:
        for request_id in list(self._running):
            self._manager.abort_request(rid=request_id)


def _spans(marks: Sequence[int]) -> tuple[VersionSpan, ...]:
    """One span for each run of equal marks."""
    spans: list[VersionSpan] = []
    start = 0
    for version, run in itertools.groupby(marks):
        end = start + len(list(run))
        spans.append(VersionSpan(Version(version), start, end))
        start = end
    return tuple(spans)
