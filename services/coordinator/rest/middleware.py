"""How many requests the REST API answers at a time, and how long they take."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.coordinator.rest.problems import TooManyRequests, refusal

MOST_REQUESTS = 1000
"""An event stream that is followed is one of them for as long as it lasts."""


class InProgress:
    """Refuses requests to the API while `most` of them are in progress. Health and metrics are always answered."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._count >= self._most:
            error = TooManyRequests(f"{self._most} requests are in progress.", "repeat it after a second.")
            await refusal(error)(scope, receive, send)
            return
        self._count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1


UNKNOWN = "unknown"
"""The route of requests that no route takes."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Timed:
    """Calls `observe` when the answer to a request begins: with its method, route, status code, and the seconds until
    then. An event stream that is followed is answered as soon as it begins."""

    def __init__(self, app: ASGIApp, observe: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", UNKNOWN)
                method = scope["method"] if scope["method"] in METHODS else UNKNOWN
                self._observe(method, route, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, observed)
