"""Whether the engine still computes. One that stands still looks alive: its processes exist, and its requests run."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from millrace.errors import Unavailable
from services.rollout.engine import Engine, EngineDied

log = structlog.get_logger(__name__)
LOOKS = 4
"""How often the engine is asked within the time that it may stand still."""


class Watched(Protocol):
    """A replica."""

    @property
    def ready_engine(self) -> Engine | None:
        """The engine, while it is neither starting nor stopping; None otherwise."""


async def watch(replica: Watched, limit_s: float, on_death: Callable[[EngineDied], None]) -> None:
    """Asks the engine whether it still computes, until cancelled. Calls `on_death` where it has not answered for
    `limit_s`, and returns."""
    since, engine = time.monotonic(), None
    while True:
        await asyncio.sleep(limit_s / LOOKS)
        if (now := replica.ready_engine) is None or now is not engine:
            since, engine = time.monotonic(), now
            continue
        left_s = since + limit_s - time.monotonic()
        if await _answers(engine, max(left_s, 0.0)):
            since = time.monotonic()
        elif replica.ready_engine is engine and time.monotonic() - since >= limit_s:
            on_death(EngineDied(f"the engine has not finished a batch for {limit_s:g} s.", "see its log above."))
            return


async def _answers(engine: Engine, within_s: float) -> bool:
    """Whether the engine answers in that time. A call that fails is an answer: what has ended is found elsewhere."""
    asking = asyncio.ensure_future(engine.finish_batch())
    await asyncio.wait({asking}, timeout=within_s)
    if not asking.done():
        asking.cancel()
        return False
    if isinstance(error := asking.exception(), Unavailable):
        log.warning("the engine does not answer", error=str(error))
        return False
    return True
