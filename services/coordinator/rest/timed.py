"""How long REST requests take."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
