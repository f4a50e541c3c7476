"""Scores groups in a pool of processes, while the engine generates.

A call that hangs, crashes, raises, needs too much memory or does not return a number costs only its own answer: the
pool kills the process where needed, starts another, and `Scored.failure` says what happened.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from millrace.errors import InvalidJob, Unavailable
from millrace.sandbox.boundaries import Missing
from millrace.spec.model import Reward
from services.rollout.scoring.process import ScoringProcess, Setup, WorkerDied

log = structlog.get_logger(__name__)
START_ATTEMPTS = 3
START_TIMEOUT_S = 120.0


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


class ScoringPool:
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
        self._setup = Setup(function, dict(options or {}), memory_mb, network, required)
        self._size = workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._alive: set[ScoringProcess] = set()
        self._idle: asyncio.Queue[ScoringProcess | None] = asyncio.Queue()
        self._starting: set[asyncio.Task[None]] = set()
        self._over: Unavailable | None = Unavailable("the scoring pool was not started.", "start it first.")
        self.restarts = 0
        """Number of processes that were replaced."""
        self.missing: tuple[Missing, ...] = ()
        """What does not separate the function from this replica, although it should."""

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

    async def start(self) -> None:
        """Starts the processes. Raises InvalidJob where the function cannot be loaded or a boundary that is required
        is missing, Unavailable where no process can be started."""
        self._over, self._idle = None, asyncio.Queue()
        started = await asyncio.gather(*(self._start_one() for _ in range(self._size)), return_exceptions=True)
        for worker in started:
            if isinstance(worker, BaseException):
                await self.close()
                raise worker
            self._idle.put_nowait(worker)
        self.missing = next(iter(self._alive)).missing or ()
        if self.missing:
            log.warning(
                "reward functions are not fully contained",
                missing={str(each.boundary): each.reason for each in self.missing},
                fix="allow user namespaces, or run the replica as root with CAP_SYS_ADMIN",
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

    async def close(self) -> None:
        """Kills all processes and waits until they are gone. Calls in progress fail."""
        self._give_up(Unavailable("the scoring pool is closed.", "start another one."))
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._alive))
        self._alive.clear()

    async def _score(self, arguments: Mapping[str, Any]) -> Scored:
        worker = await self._take()
        usable = False
        try:
            scored, usable = await self._ask(worker, arguments)
            return scored
        finally:
            if usable:
                self._idle.put_nowait(worker)
            else:
                self._replace(worker)

    async def _take(self) -> ScoringProcess:
        while self._over is None:
            worker = await self._idle.get()
            if worker is None:
                # The pool is closed. The None is put back for the next caller that waits.
                self._idle.put_nowait(None)
            elif worker.alive:
                return worker
            else:
                self._replace(worker)
        raise self._over

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

    def _replace(self, worker: ScoringProcess) -> None:
        worker.kill()
        if self._over is not None:
            return
        self.restarts += 1
        self._starting.add(asyncio.create_task(self._start_another(worker)))

    async def _start_another(self, worker: ScoringProcess) -> None:
        await worker.end()
        self._alive.discard(worker)
        try:
            self._idle.put_nowait(await self._start_one())
        except (InvalidJob, Unavailable) as error:
            log.error("a scoring process is lost", reason=str(error), left=len(self._alive))
            if not self._alive and self._starting == {asyncio.current_task()}:
                self._give_up(Unavailable(f"no scoring process is left: {error.what}", error.fix))
        finally:
            self._starting.discard(asyncio.current_task())

    async def _start_one(self) -> ScoringProcess:
        """Starts a process. A function that cannot be loaded is an error at once; a process that dies meanwhile is
        tried again, at most START_ATTEMPTS times."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                worker = await ScoringProcess.start(self._setup, self._start_timeout_s)
            except WorkerDied as death:
                reason = str(death)
                log.warning(
                    "a scoring process did not start", function=self._setup.function, reason=reason, attempt=attempt
                )
            else:
                self._alive.add(worker)
                return worker
        raise Unavailable(
            f"reward.function: no process could load {self._setup.function} in {START_ATTEMPTS} attempts: it {reason}.",
            "see the replica's standard error; raise reward.memory_mb if the module imports large libraries.",
        )

    def _give_up(self, over: Unavailable) -> None:
        self._over = over
        self._idle.put_nowait(None)
