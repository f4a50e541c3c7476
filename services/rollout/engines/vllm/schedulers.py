"""The schedulers of a vLLM engine, one for each data-parallel rank: calls into their workers, which of them computes a
request, and what they tell of themselves.

Each rank has attention, a cache of keys and values and a scheduler of its own; experts lie over the workers of all
ranks, so all ranks compute step by step together. An engine without data parallelism is one of a single rank.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

from millrace.errors import Unavailable
from millrace.spec import JobSpec
from services.rollout.engine import EngineStats
from services.rollout.engines.adapter import AdapterShape
from services.rollout.weights.worker_messages import Request, decode_reply, encode
from services.rollout.weights.worker_methods import BETWEEN_BATCHES
from services.rollout.weights.worker_rpc import RPC_S, WorkerRpc

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")
CONNECT_S = 30.0
"""Longest time until every worker has connected to the replica."""


class VllmWorkers:
    """See `Workers`. vLLM's own call is answered by the thread that generates, between two batches."""

    def __init__(self) -> None:
        self._rpc = WorkerRpc("vLLM")
        self._llm: Any = None

    async def listen(self, host: str = "") -> str:
        """Returns the place that the workers connect to, see `WorkerRpc.listen`."""
        return await self._rpc.listen(host)

    def use(self, llm: Any) -> None:
        """The workers are those of `llm`, an AsyncLLM."""
        self._llm = llm

    async def connect(self, place: str, spec: JobSpec, adapter: AdapterShape | None, workers: int) -> list[list[str]]:
        """Has every worker connect, read the tower for images if no publication brings it, and make a place for
        `adapter`. Answers, for each worker, the names of the layers whose adapter has no place there. Raises
        Unavailable if one does not connect in time."""
        trained = spec.trainer.train_tower
        if spec.data.images is not None and not trained:
            await self._between_batches("millrace_load_tower", (spec.model.path,), "load_tower")
        shape = "" if adapter is None else adapter.encode()
        unplaced = await self._between_batches("millrace_connect", (place, shape, trained), "connect")
        await self._rpc.wait_for_workers(workers, CONNECT_S)
        return unplaced

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        if not paused and method not in BETWEEN_BATCHES:
            return await self._rpc.ask(method, *arguments)
        name = method.__name__
        request = encode(Request(0, name, arguments, paused, float("inf")))
        replies = await self._between_batches("millrace_call", (request,), name)
        return [decode_reply(reply).result(method) for reply in replies]

    async def _between_batches(self, method: str, arguments: tuple[str | bytes | bool, ...], name: str) -> list[Any]:
        """Calls a method of `WorkerExtension` in every worker, in the order of their ranks. `name` is for the error if
        one does not answer."""
        client = self._llm.engine_core
        try:
            async with asyncio.timeout(RPC_S):
                # AsyncLLM.collective_rpc asks all ranks, and returns the answers of the first alone.
                asked = (
                    client._call_utility_async("collective_rpc", method, None, arguments, None, engine=rank)
                    for rank in client.core_engines
                )
                return [answer for of_rank in await asyncio.gather(*asked) for answer in of_rank]
        except TimeoutError as error:
            raise Unavailable(f"vLLM's workers did not answer {name} within {RPC_S:g} s.") from error

    async def close(self) -> None:
        """Closes the connections and forgets the AsyncLLM. Idempotent."""
        self._llm = None
        await self._rpc.close()


@dataclass
class _Rank:
    """The requests of a data-parallel rank."""

    running: int = 0
    """Requests in flight."""
    given: int = 0
    """Requests so far."""


class RequestPlaces:
    """Which data-parallel rank computes a request. Samples of one prompt, and turns of one episode, go to the rank
    whose cache has their prefix; others to the rank with the fewest requests."""

    def __init__(self, ranks: int, block: int, blocks: int, spread: int) -> None:
        """`block`: tokens of a block of the cache of prefixes, 0 if there is none; `blocks`: how many the caches of all
        ranks hold. A rank gets a request for its prefix only while it has at most `spread` requests more than another
        one."""
        self._ranks = [_Rank() for _ in range(ranks)]
        self._block, self._most, self._spread = block, blocks, spread
        self._held: OrderedDict[int, frozenset[int]] = OrderedDict()
        """The ranks whose cache has a prefix, by the hash of its tokens; those used last are at the end."""

    def begin(self, tokens: Sequence[int]) -> int:
        """The rank that computes a request with these tokens. Its `end` has to follow."""
        rank = self._choose(tokens)
        self._ranks[rank].running += 1
        self._ranks[rank].given += 1
        self.computed(rank, tokens)
        return rank

    def end(self, rank: int) -> bool:
        """A request of `rank` has ended. Answers whether the rank has no other one."""
        self._ranks[rank].running -= 1
        return self._ranks[rank].running == 0

    def computed(self, rank: int, tokens: Sequence[int]) -> None:
        """The cache of `rank` has the keys and values of these tokens."""
        if len(self._ranks) == 1:
            return
        for prefix in self._prefixes(tokens):
            self._held[prefix] = self._held.get(prefix, frozenset()) | {rank}
            self._held.move_to_end(prefix)
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """No request finds keys and values of those before it any more."""
        self._held.clear()

    def _choose(self, tokens: Sequence[int]) -> int:
        if len(self._ranks) == 1:
            return 0
        least = min(rank.running for rank in self._ranks)
        near = [n for n in self._with_prefix(tokens) if self._ranks[n].running <= least + self._spread]
        return min(near or range(len(self._ranks)), key=lambda n: (self._ranks[n].running, self._ranks[n].given))

    def _with_prefix(self, tokens: Sequence[int]) -> frozenset[int]:
        """The ranks whose cache has the longest known prefix of the tokens; none if that is less than half of them:
        prompts may begin with the same instructions."""
        ranks, known = frozenset[int](), 0
        for prefix in self._prefixes(tokens):
            if prefix not in self._held:
                break
            ranks, known = self._held[prefix], known + self._block
        return ranks if 2 * known >= len(tokens) else frozenset()

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[int]:
        """A hash of each prefix of whole blocks."""
        prefix = 0
        for end in range(self._block, len(tokens) + 1, self._block) if self._block else ():
            prefix = hash((prefix, *tokens[end - self._block : end]))
            yield prefix


class SchedulerStats:
    """Stands where AsyncLLM has its loggers of statistics, and keeps the last numbers of all schedulers together."""

    def __init__(self) -> None:
        self.last_step_s = 0.0
        """When the last step's tokens arrived (time.perf_counter())."""
        self._last: dict[int, EngineStats] = {}
        """The last numbers of each data-parallel rank, as far as they are of the present: running and waiting requests
        and the part of its cache."""
        self._ranks = 1
        self._prompt_tokens = self._cached_prompt_tokens = self._preempted = 0
        self._cleared = self._cleared_left = 0
        """Requests whose keys and values were cleared by a pause; those of them that may not have begun again yet."""
        self._others: Any = None

    @property
    def idle(self) -> EngineStats:
        """The numbers of an engine that has nothing to do."""
        return EngineStats(0, 0, 0.0, self._prompt_tokens, self._cached_prompt_tokens, self._preempted)

    @property
    def last(self) -> EngineStats | None:
        """The last numbers, over all ranks: requests are added up, the part of the cache is that of all caches. None
        before the first step."""
        if not self._last:
            return None
        ranks = self._last.values()
        running, waiting = sum(rank.running for rank in ranks), sum(rank.waiting for rank in ranks)
        return replace(
            self.idle, running=running, waiting=waiting, cache_used=sum(rank.cache_used for rank in ranks) / self._ranks
        )

    def attach(self, llm: Any, *, others: bool) -> None:
        """Takes the place of the loggers of an AsyncLLM that was built with statistics and has not generated yet.
        `others`: whether the loggers go on, as the job asks for them; otherwise single outputs are not looked at."""
        if others:
            self._others = llm.logger_manager
        else:
            llm.log_stats = llm.output_processor.log_stats = False
        llm.logger_manager = self
        self._ranks = llm.vllm_config.parallel_config.data_parallel_size

    def cleared(self, requests: int) -> None:
        """A pause made all running requests, at most `requests`, give up their keys and values. vLLM preempts them for
        that, and counts them like those for which its cache had no room."""
        self._cleared = self._cleared_left = requests

    def rests(self, rank: int) -> None:
        """A rank has no requests: while others compute, its scheduler tells nothing."""
        if rank in self._last:
            self._last[rank] = EngineStats(0, 0, 0.0)

    def record(self, *arguments: Any, scheduler_stats: Any = None, engine_idx: int = 0, **named: Any) -> None:
        """Called by AsyncLLM with the outputs of each step of a rank's scheduler."""
        self.last_step_s = time.perf_counter()
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
            running, used = scheduler_stats.num_running_reqs, float(scheduler_stats.kv_cache_usage)
            self._last[engine_idx] = EngineStats(running, waiting, used)
            if (prompts := scheduler_stats.prefix_cache_stats) is not None:
                self._prompt_tokens += prompts.queries
                self._cached_prompt_tokens += prompts.hits
                self._count_preempted(prompts.preempted_requests, sum(rank.waiting for rank in self._last.values()))
        if self._others is not None:
            self._others.record(*arguments, scheduler_stats=scheduler_stats, engine_idx=engine_idx, **named)

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
