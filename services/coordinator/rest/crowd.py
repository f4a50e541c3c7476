"""How many requests the REST API answers at a time."""

from starlette.types import ASGIApp, Receive, Scope, Send

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
