"""Answers as server-sent events. A turn is sent when it is whole, as engines return it. Until then comments keep the
connection alive.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from services.rollout.dialects.refusals import Refused
from services.rollout.dialects.requests import gone
from services.rollout.dialects.turns import SampledTurn

STATUS_S = 1.0
"""A request that is refused within this time gets a status; one that is refused later, an event."""
PING_S = 5.0
"""Time between two comments."""
Events = Callable[[SampledTurn], Iterable[str]]


def event(data: Mapping[str, Any], name: str = "") -> str:
    """One event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def streamed(
    request: Request, work: Coroutine[Any, Any, SampledTurn], events: Events, refused: Callable[[Refused], str]
) -> Response:
    """The turn of `work` as `events`. It is cancelled when the sender of the request goes away. Raises Refused and
    ClientDisconnect if they come before the stream has begun."""
    sampling, away = asyncio.create_task(work), asyncio.create_task(gone(request))
    both = {sampling, away}
    try:
        await asyncio.wait(both, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED)
        if sampling.done():
            sampling.result()
        elif away.done():
            raise ClientDisconnect
    except BaseException:
        _end(both)
        raise
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(sampling, away, events, refused), 200, headers, "text/event-stream")


async def _events(
    sampling: asyncio.Task[SampledTurn], away: asyncio.Task[None], events: Events, refused: Callable[[Refused], str]
) -> AsyncIterator[str]:
    both = {sampling, away}
    try:
        while not sampling.done() and not away.done():
            await asyncio.wait(both, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                yield ": the turn is being sampled\n\n"
        if sampling.done():
            for each in events(sampling.result()):
                yield each
    except Refused as error:
        yield refused(error)
    finally:
        _end(both)


def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
