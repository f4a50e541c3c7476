"""Pools for one test, and the processes that they have."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil

from millrace.rewards import Scope, Term
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored


@asynccontextmanager
async def running(
    function: str, *, options: Mapping[str, Any] | None = None, scope: Scope = "answer", **settings: Any
) -> AsyncIterator[ScoringPool]:
    term = Term(function, options or {}, scope)
    pool = ScoringPool([term], **{"workers": 1, "timeout_s": 20.0, "start_timeout_s": 60.0, **settings})
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def scoring(function: str, act: Callable[[ScoringPool], Awaitable[Any]], **settings: Any) -> Any:
    async def whole() -> Any:
        async with running(function, **settings) as pool:
            return await act(pool)

    return asyncio.run(whole())


def one_group(function: str, answers: list[str], **settings: Any) -> list[Scored]:
    return scoring(function, lambda pool: pool.score_group("data", answers, "truth", {"index": 3}), **settings)


def processes(mark: str) -> list[psutil.Process]:
    """The processes of pools with this mark that have not ended, on the inside and on the outside."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("TEST_POOL") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def gone(mark: str, within_s: float = 10.0) -> bool:
    """Whether no process with this mark is left, at the latest after `within_s`."""
    return reached(lambda: not processes(mark), within_s)


def reached(state: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether the state comes about within that time."""
    deadline = time.monotonic() + within_s
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
