"""Scores groups in a pool of processes beside the engine.

A call that hangs, crashes, raises, eats memory or returns what is not a number costs its own answer: the pool kills
the process where it has to, starts another, and says in `Scored.failure` what happened.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from millrace.errors import InvalidJob, Unavailable
from services.rollout.scoring.process import ScoringProcess, Setup, WorkerDied

log = structlog.get_logger(__name__)
START_ATTEMPTS = 3
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Scored:
    score: float | None
    """Finite; None where there is a failure."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else the function returned."""
    seconds: float = 0.0
    failure: str | None = None
    """`timeout after 10 s`, `raised ValueError: ...`, `killed: memory limit 512 MB`, `returned nan`."""


class ScoringPool:
    """`workers` processes that each have the reward function loaded. `start` it, `close` it."""

    def __init__(
        self,
        function: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        timeout_s: float = 30.0,
        memory_mb: int = 2048,
        network: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`timeout_s` is for one call, `start_timeout_s` for loading the function. `memory_mb` is what one process may
        allocate over what Python itself takes. Without `network` the function cannot reach any."""
        self._setup = Setup(function, dict(options or {}), memory_mb, network)
        self._size = workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._alive: set[ScoringProcess] = set()
        self._idle: asyncio.Queue[ScoringProcess | None] = asyncio.Queue()
        self._starting: set[asyncio.Task[None]] = set()
        self._over: Unavailable | None = Unavailable("the scoring pool was not started.", "await start() first.")
        self.restarts = 0
        """Processes that were replaced."""

    async def start(self) -> None:
        """Raises InvalidJob where the function cannot be loaded, Unavailable where no process can be started."""
        self._over, self._idle = None, asyncio.Queue()
        started = await asyncio.gather(*(self._start_one() for _ in range(self._size)), return_exceptions=True)
        for worker in started:
            if isinstance(worker, BaseException):
                await self.close()
                raise worker
            self._idle.put_nowait(worker)
        if (why := next(iter(self._alive)).network) is not None:
            log.warning(
                "reward functions can reach the network", reason=why, fix="allow user namespaces, or run as root"
            )

    async def score_group(
        self, data_source: str, answers: Sequence[str], ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> list[Scored]:
        """Scores the answers of one group, in their order, on as many processes as are free.

        Raises Unavailable where the pool is closed or no process can be started any more.
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
        """Kills every process and waits until they are gone. Calls that wait or run raise or fail."""
        self._give_up(Unavailable("the scoring pool is closed.", "start another."))
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
                # The pool is over; whoever waits behind is woken in turn.
                self._idle.put_nowait(None)
            elif worker.alive:
                return worker
            else:
                self._replace(worker)
        raise self._over

    async def _ask(self, worker: ScoringProcess, arguments: Mapping[str, Any]) -> tuple[Scored, bool]:
        """The answer, and whether the process can be asked again."""
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
            return Scored(None, {}, reply["seconds"], failure), True
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
        """Loading fails for good; a process that ends meanwhile is tried again, at most START_ATTEMPTS times."""
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
            "see the replica's standard error; raise reward.memory_mb if what it imports is large.",
        )

    def _give_up(self, over: Unavailable) -> None:
        self._over = over
        self._idle.put_nowait(None)
