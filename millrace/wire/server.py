"""The gRPC server of every service: health, reflection, the shared token, typed errors, a stop that drains."""

import hmac
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from millrace.errors import MillraceError, Unavailable
from millrace.wire.channel import OPTIONS, token
from millrace.wire.status import status_of

log = structlog.get_logger(__name__)
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class Server:
    """Serves `servicers` at `host:port`; port 0 takes a free one. `servicers`: for each full service name, the function
    that adds the service to a server. Raises Unavailable where the port is taken."""

    def __init__(self, servicers: Mapping[str, Callable[[grpc.aio.Server], None]], host: str, port: int) -> None:
        self._server = grpc.aio.server(interceptors=[_Token(), _Errors()], options=[*OPTIONS, ("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add in servicers.values():
            add(self._server)
        self._names = list(servicers)
        reflection.enable_server_reflection([*servicers, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: the address is taken or not this host's.",
                "choose another port, or stop the process that uses it.",
            ) from error

    async def start(self) -> None:
        """Takes calls from now on."""
        await self._server.start()
        await self.healthy(True)

    async def healthy(self, serving: bool) -> None:
        """Sets what the health service answers, for the whole server and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Takes no new calls, waits at most `grace_s` for those in progress, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def host_address() -> str:
    """The name or address by which other hosts reach this one: MILLRACE_HOST, or the first address of its name."""
    if host := os.environ.get("MILLRACE_HOST"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class _Token(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses callers without the shared token, where one is set. Health and reflection stay open."""

    def __init__(self) -> None:
        self._expected = f"Bearer {secret}" if (secret := token()) else ""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        if not self._expected or details.method.startswith(OPEN_SERVICES):
            return await continuation(details)
        if hmac.compare_digest(str(given), self._expected):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the caller's token is missing or wrong.")


class _Errors(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Turns a MillraceError of a handler into its status. Any other exception is a bug: gRPC logs it and answers
    UNKNOWN."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_SERVICES):
            return handler
        if handler.unary_unary:
            return handler._replace(unary_unary=_unary(handler.unary_unary, details.method))
        if handler.unary_stream:
            return handler._replace(unary_stream=_streaming(handler.unary_stream, details.method))
        return handler


def _unary(behaviour: Any, method: str) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except MillraceError as error:
            await _abort(context, error, method)

    return answer


def _streaming(behaviour: Any, method: str) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            async for reply in behaviour(request, context):
                yield reply
        except MillraceError as error:
            await _abort(context, error, method)

    return answer


async def _abort(context: grpc.aio.ServicerContext, error: MillraceError, method: str) -> None:
    code, details, trailing = status_of(error)
    log.warning("call refused", method=method, caller=context.peer(), code=code.name, error=str(error))
    await context.abort(code, details, trailing_metadata=trailing)
