"""Scores groups in a pool of processes, while the engine generates.

A call that hangs, crashes, raises, needs too much memory or does not return a number costs only its own answer: the
pool kills the process where needed, starts another, and `Scored.failure` says what happened.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.spec.model import Reward
from services.rollout.scoring.process import ScoringProcess, Setup, WorkerDied
from services.rollout.scoring.processes import START_TIMEOUT_S, ProcessPool


@dataclass(frozen=True)
class Scored:
    """The score of one answer."""

    score: float | None
    """A finite number; None where scoring failed."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further values that the reward function returned."""
    seconds: float = 0.0
    failure: str | None = None
    """`timeout after 10 s`, `raised ValueError: ...`, `killed: memory limit 512 MB`, `returned nan`."""


class ScoringPool(ProcessPool):
    """`workers` processes that each have the reward function loaded. Use it between `start` and `close`."""

    def __init__(
        self,
        function: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        timeout_s: float = 30.0,
        memory_mb: int = 2048,
        network: bool = False,
        required: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`timeout_s` limits one call, `start_timeout_s` the loading of the function. `memory_mb`: what one process
        and all that it starts may allocate beyond the size of Python itself. Without `network` the function cannot
        reach any network. `required`: a machine that does not give every boundary is refused."""
        super().__init__(Setup(function, dict(options or {}), memory_mb, network, required), workers, start_timeout_s)
        self._timeout_s = timeout_s

    @classmethod
    def of_job(cls, reward: Reward, function: str, workers: int) -> "ScoringPool":
        """A pool that obeys a job's `reward`. `function`: the name of the reward that is meant."""
        return cls(
            function,
            reward.options,
            workers=workers,
            timeout_s=reward.timeout_s,
            memory_mb=reward.memory_mb,
            network=reward.network,
            required=reward.isolation == "required",
        )

    async def score_group(
        self, data_source: str, answers: Sequence[str], ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> list[Scored]:
        """Scores the answers of one group, in their order, on as many processes as are free.

        Raises Unavailable where the pool is closed, or no process can be started any more.
        """
        rest = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": dict(extra_info)}
        calls = (self._score({"solution_str": answer, **rest}) for answer in answers)
        scored: list[Scored] = []
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            scored.append(result)
        return scored

    async def _score(self, arguments: Mapping[str, Any]) -> Scored:
        worker = await self._take()
        usable = False
        try:
            scored, usable = await self._ask(worker, arguments)
            return scored
        finally:
            self._give_back(worker, usable=usable)

    async def _ask(self, worker: ScoringProcess, arguments: Mapping[str, Any]) -> tuple[Scored, bool]:
        """The score, and whether the process can be used again."""
        start = time.perf_counter()
        try:
            reply = await worker.ask(arguments, self._timeout_s)
        except TimeoutError:
            return Scored(None, {}, time.perf_counter() - start, f"timeout after {self._timeout_s:g} s"), False
        except WorkerDied as death:
            return Scored(None, {}, time.perf_counter() - start, str(death)), False
        if reply.get("out_of_memory"):
            return Scored(None, {}, reply["seconds"], f"killed: memory limit {self._setup.memory_mb} MB"), False
        if (failure := reply.get("failure")) is not None:
            return Scored(None, {}, reply["seconds"], failure), not reply.get("spoiled")
        return Scored(reply["score"], reply["details"], reply["seconds"]), True
