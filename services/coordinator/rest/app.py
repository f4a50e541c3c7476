"""The FastAPI application: routes, errors, token, health."""

import os
import socket

from fastapi import Depends, FastAPI, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from redis.exceptions import RedisError

from millrace import __version__
from millrace.errors import Unavailable
from millrace.wire.channel import token
from millrace.wire.tls import scheme
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.waiting import JobViews
from services.coordinator.rest import fleet, jobs, pages, reading, timeline, users
from services.coordinator.rest.middleware import MOST_REQUESTS, Audited, InProgress, Timed
from services.coordinator.rest.problems import install
from services.coordinator.rest.roles import check_table
from services.coordinator.rest.schema import CALLERS, EVERYWHERE, Application, Responses, error_responses
from services.coordinator.stages.run import Shared
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
        jobs.routes(shared.store, control, views, shared.events),
        timeline.routes(shared.store, shared.spans),
        jobs.webhook_routes(shared.store, webhooks),
        fleet.routes(shared.whole_fleet, shared.queues),
        reading.routes(),
        users.routes(shared.store.users, shared.store.audit),
    )
    for router in routers:
        app.include_router(router, dependencies=allowed, responses=CALLERS)
    # Newer releases of FastAPI do not list the endpoints of a router in `app.routes`.
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
