"""A coordinator that does not lead: it waits for the lease, and says meanwhile who leads.

REST answers 503 with `Retry-After`, and sends a browser on to the leader's page; `/healthz` says that the process runs,
`/readyz` that it does not lead. gRPC answers UNAVAILABLE, and its health service NOT_SERVING.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.empty_pb2 import Empty
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from millrace.errors import Unavailable
from millrace.wire.http_server import HttpServer
from millrace.wire.server import Server
from millrace.wire.tls import identity
from services.coordinator.rest.problems import NotLeading, refusal
from services.coordinator.store import Holder, Store, StoreDown

log = structlog.get_logger(__name__)
LOOK_S = 0.25
"""How often a coordinator that stands by looks for the lease."""
BIND_S = 5.0
"""How long a port may be taken by the server that this process had there before."""
SERVICES = ("millrace.v1.Fleet", "millrace.v1.Work")
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class Standby:
    """Waits for the lease. One that comes back after it led takes no lease of its own place: it would take it from its
    successor there."""

    def __init__(self, own: Holder, grpc_at: tuple[str, int], http: socket.socket, lease_s: float) -> None:
        self._own, self._grpc_at, self._http, self._lease_s = own, grpc_at, http, lease_s
        self.leader = own
        """Who led when it was looked at last."""

    async def wait(self, store: Store, stop: asyncio.Event, *, back: bool) -> bool:
        """Waits until this coordinator leads, and answers True; False if it was stopped before. `back`: as
        `Leadership.take`. Raises StoreDown, Unavailable if the port of gRPC is taken."""
        leader = await store.lead(self._own, self._lease_s, back=back)
        if leader is None:
            return True
        self.leader = leader
        log.info("standing by", leader=leader.grpc, rest=leader.rest)
        async with self._answering():
            while not stop.is_set():
                try:
                    async with asyncio.timeout(LOOK_S):
                        await stop.wait()
                except TimeoutError:
                    if await self._taken(store):
                        return True
        return False

    async def _taken(self, store: Store) -> bool:
        try:
            found = await store.lead(self._own, self._lease_s)
        except StoreDown as error:
            log.warning("waiting for Redis", error=str(error))
            return False
        self.leader = found or self._own
        return found is None

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        own = identity()
        app = Starlette(routes=[Route("/healthz", _live), Route("/{path:path}", self._rest, methods=METHODS)])
        rest = HttpServer(app, certificate_required=own is not None and own.rest_clients_required)
        server = await bound(lambda: Server(dict.fromkeys(SERVICES, self._add), *self._grpc_at))
        await server.start(serving=False)
        serving = asyncio.create_task(rest.serve(sockets=[self._http.dup()]))
        try:
            yield
        finally:
            rest.should_exit = True
            await asyncio.gather(serving, server.stop(0), return_exceptions=True)

    def _add(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((_Refusing(self),))

    async def refuse(self, request: object, context: grpc.aio.ServicerContext) -> Empty:
        raise self._error(self.leader.grpc, "MILLRACE_COORDINATOR")

    async def _rest(self, request: Request) -> Response:
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{self.leader.rest}{request.url.path}")
        error = self._error(self.leader.rest, "MILLRACE_URL")
        return refusal(NotLeading(error.what, error.fix))

    def _error(self, leader: str, variable: str) -> Unavailable:
        what = f"the coordinator at {self._own.place} does not lead; the leader is at {leader}."
        return Unavailable(what, f"ask there, or name both in {variable}, with a comma between them.")


class _Refusing(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers every call of the coordinator's services."""

    def __init__(self, standby: Standby) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(
            standby.refuse, request_deserializer=lambda data: Empty(), response_serializer=Empty.SerializeToString
        )

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handler if details.method.split("/")[1] in SERVICES else None


async def bound(server: Any) -> Server:
    """The server that `server()` makes. The port may still be that of the server before it for a moment. Raises
    Unavailable if it stays taken."""
    deadline = asyncio.get_running_loop().time() + BIND_S
    while True:
        try:
            made: Server = server()
            return made
        except Unavailable:
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(0.05)


async def _live(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})
