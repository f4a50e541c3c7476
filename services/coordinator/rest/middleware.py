"""How many requests the REST API answers at a time, and how long they take."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.rest.users import AuditView
from services.coordinator.rest.problems import TooManyRequests, refusal
from services.coordinator.rest.roles import Caller
from services.coordinator.store import StoreDown
from services.coordinator.store.users import AuditLog

log = structlog.get_logger(__name__)

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


class Audited:
    """Adds to the audit log who asked for a change, and what came of it; and what a user was not allowed to see."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        state, answer = scope.setdefault("state", {}), dict[str, Any]()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.update(status=message["status"], headers=dict(message["headers"]))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            caller = state.get("caller")
            refused = answer.get("status") == HTTPStatus.FORBIDDEN
            if caller is not None and answer and (refused or scope["method"] not in READING):
                await self._note(scope, caller, answer["status"], answer["headers"].get(b"location", b"").decode())

    async def _note(self, scope: Scope, caller: Caller, status: int, made: str) -> None:
        peer = scope["client"][0] if scope.get("client") else ""
        entry = AuditView(
            time_s=time.time(),
            user=caller.user,
            token=caller.token,
            peer=peer,
            method=scope["method"],
            path=scope["path"],
            status=status,
            made=made,
        )
        log.info("asked for a change", **entry.model_dump(exclude={"time_s"}))
        try:
            await self._log.add(entry)
        except StoreDown:
            log.warning("the audit log was not written: Redis does not answer", path=entry.path)


READING = frozenset({"GET", "HEAD", "OPTIONS"})
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
