"""The HTTP server of a host of environments.

| path | for |
|---|---|
| `GET /health` | whether it answers, the environment's name, the episodes that run |
| `POST /episodes` | plays an `EpisodeRequest` to its end, and answers `PlayedEpisode`; it ends with its connection |
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.environments.messages import EpisodeRequest, PlayedEpisode, Plays

LARGEST_BODY = 16 << 20
"""Bytes of a request's body: the data of one task, and an address."""
BODY_S = 60.0
"""How long a body may take to arrive."""


class _TooLarge(Exception):
    """The body has more than LARGEST_BODY bytes."""


class Desk:
    """Answers requests."""

    def __init__(self, environment: Plays, at_once: int, secret: str) -> None:
        """`at_once`: episodes that run at the same time; further ones wait. `secret`: what callers have to know; empty:
        nothing."""
        self._environment, self._secret = environment, secret
        self._room = asyncio.Semaphore(at_once)
        self._running = 0

    async def health(self, request: Request) -> Response:
        """Whether the host answers."""
        return JSONResponse({"environment": self._environment.name, "running": self._running})

    async def episode(self, request: Request) -> Response:
        """One episode."""
        given = request.headers.get("authorization", "")
        if self._secret and not hmac.compare_digest(given.encode(), f"Bearer {self._secret}".encode()):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        try:
            async with asyncio.timeout(BODY_S):
                asked = EpisodeRequest.read(json.loads((await _body(request)).decode()))
        except _TooLarge:
            return JSONResponse({"error": f"the body has more than {LARGEST_BODY >> 20} MiB"}, 413)
        except TimeoutError:
            return JSONResponse({"error": f"the body did not arrive within {BODY_S:g} s"}, 400)
        except (ValueError, TypeError, RecursionError) as error:
            return JSONResponse({"error": f"the body cannot be read: {error}"}, 400)
        running = asyncio.create_task(self._run(asked))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(running.result().json()) if running.done() else Response(status_code=499)
        finally:
            gone.cancel()
            running.cancel()

    async def _run(self, asked: EpisodeRequest) -> PlayedEpisode:
        async with self._room:
            self._running += 1
            try:
                return await self._environment.run(asked)
            finally:
                self._running -= 1


def application(environment: Plays, at_once: int, secret: str) -> Starlette:
    """The ASGI application."""
    desk = Desk(environment, at_once, secret)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with environment.serving():
            yield

    routes = [
        Route("/health", desk.health, methods=["GET"]),
        Route("/episodes", desk.episode, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _body(request: Request) -> bytes:
    """The whole body. Raises _TooLarge."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        if (size := size + len(part)) > LARGEST_BODY:
            raise _TooLarge
    return b"".join(parts)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
