"""The FastAPI application: routes, errors, token, health; how many requests it answers at a time, and how
long they take."""

import os
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import Depends, FastAPI, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace import __version__
from millrace.errors import Unavailable
from millrace.rest.users import AuditView
from millrace.wire.channel import token
from millrace.wire.tls import scheme
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.placing import JobViews
from services.coordinator.rest import fleet, jobs, pages, reading, timeline, users
from services.coordinator.rest.problems import TooManyRequests, install, refusal
from services.coordinator.rest.schema import EVERYWHERE, Application, Responses, error_responses
from services.coordinator.rest.users import Caller, check_table
from services.coordinator.stages.run import Shared
from services.coordinator.store import StoreDown
from services.coordinator.store.users import AuditLog
from services.coordinator.webhooks import Webhooks

ABOUT = """Reinforcement-learning post-training of language models as three services.

Submit a **job**, follow its **events**, read its **metrics**, **samples** and **ledger**, and see the **fleet** of
trainers and replicas that runs it. Errors are problem documents with a `fix`: what to do next.
"""


METRICS: Responses = {
    200: {"description": "The metrics.", "content": {"text/plain; version=0.0.4": {"schema": {"type": "string"}}}}
}


class Health(BaseModel):
    status: str


class ScrapeTarget(BaseModel):
    """Members whose metrics Prometheus can read, as its `http_sd_configs` take them."""

    targets: list[str] = Field(description="host:port")
    labels: dict[str, str]


def application(shared: Shared, control: Control, views: JobViews, webhooks: Webhooks, name: str) -> FastAPI:
    """The application of one coordinator. `name` is the host that it listens at."""
    app = Application(
        title="Millrace", version=__version__, description=ABOUT, docs_url=None, redoc_url=None, responses=EVERYWHERE
    )
    install(app)
    app.add_middleware(Audited, log=shared.store.audit)
    app.add_middleware(InProgress, most=MOST_REQUESTS)
    app.add_middleware(Timed, observe=shared.prometheus.requested)
    secret = token()
    allowed = [Depends(users.bearer(secret, shared.store.users))]
    app.state.index = shared.store.index
    if not secret:
        names = (name, os.environ.get("MILLRACE_HOST", ""), socket.gethostname())
        allowed.append(Depends(users.no_foreign_page(names)))
    routers = (
        jobs.routes(allowed, shared.store, control, views, shared.events),
        timeline.routes(allowed, shared.store, shared.spans),
        jobs.webhook_routes(allowed, shared.store, webhooks),
        fleet.routes(allowed, shared.whole_fleet, shared.queues),
        reading.routes(allowed),
        users.routes(allowed, shared.store.users, shared.store.audit),
    )
    for router in routers:
        app.take(router)
    app.state.endpoints = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    check_table({(method, route.path) for route in app.state.endpoints for method in route.methods})
    _operations(app, shared)
    pages.add(app)
    pages.add_page(app)
    return app


def _operations(app: FastAPI, shared: Shared) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> Health:
        """Whether the process runs."""
        return Health(status="ok")

    @app.get("/readyz", tags=["operations"], responses=error_responses({503: "Redis does not answer."}))
    async def readyz() -> Health:
        """Whether the coordinator can take jobs: whether it reaches its Redis."""
        try:
            await shared.store.connection.check()
        except RedisError as error:
            what = f"Redis at {shared.store.connection.name} takes no writes: {error}."
            raise Unavailable(what, "start Redis again.") from error
        return Health(status="ready")

    @app.get(
        "/metrics",
        tags=["operations"],
        response_class=Response,
        responses=METRICS | error_responses({503: "Redis does not answer."}),
    )
    async def metrics() -> Response:
        """Metrics in Prometheus's text format, of the jobs that are active or have ended lately."""
        text = await shared.prometheus.page(shared.store, shared.whole_fleet.view({}))
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/metrics/targets", tags=["operations"])
    async def targets() -> list[ScrapeTarget]:
        """The addresses at which trainer and replicas serve their metrics, for the `http_sd_configs` of Prometheus."""
        fleet = shared.whole_fleet.view({})
        present = [m for m in (*fleet.trainers, *fleet.replicas) if m.metrics_address and not m.gone]
        encrypted = {"__scheme__": "https"} if scheme() == "https" else {}
        return [
            ScrapeTarget(targets=[m.metrics_address], labels={"role": m.kind, "member": m.id} | encrypted)
            for m in present
        ]


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
