"""What every call passes before its handler: the token is right, the message comes in time, the message can be read.

gRPC reads the message of a unary call before it calls the handler. Here every call is taken as a stream, so that
nothing is read for a caller without the token: what such a caller sends stays in the buffers of its connection.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from millrace.contracts.field_rules import check
from millrace.errors import Fenced, InvalidRequest, MillraceError, NotFound, Unavailable
from millrace.telemetry.spans.context import enter, incoming
from millrace.wire.channel import LEADER
from millrace.wire.status import status_of
from millrace.wire.tls import Identity

EVERY_S = 10.0
"""Equal incidents within this time are one line, with their number."""


class Tally:
    """Logs the first of many equal incidents at once, and the others as one line with their number."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """For each key that was logged within EVERY_S: the incidents since then."""

    def add(self, event: str, *, key: str = "", **facts: Any) -> None:
        """Counts an incident. Incidents with the same event and `key` are equal; `facts` are logged with the first."""
        key = f"{event} {key}"
        if key in self._counts:
            self._counts[key] += 1
            return
        log.warning(event, **facts)
        self._counts[key] = 0
        asyncio.get_running_loop().call_later(EVERY_S, self._report, event, key)

    def _report(self, event: str, key: str) -> None:
        if times := self._counts.pop(key):
            log.warning(event, again=f"{times} more times within {EVERY_S:g} s", about=key.removeprefix(event).strip())


log = structlog.get_logger(__name__)
LONGEST_EPOCH = 18
"""Digits of a leader's epoch."""
EXPECTED = (Fenced, NotFound)
"""Refusals that belong to the protocol. When a job is cancelled, every answer that is still on its way gets one."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""The only method that needs no token: it answers for the whole server, whatever service the caller names."""
RECEIVE_S = 60.0
"""How long a caller may take to send the message of a call."""
MOST_CALLS = 10_000
"""Calls in progress at one server. Each costs at most a connection's window before its message is read."""

Observe = Callable[[str, str, float], None]
"""Takes note of a call that has ended: path of its method, name of its status code, seconds."""


def unobserved(path: str, code: str, seconds: float) -> None:
    """Takes no note of calls."""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Admits callers that have `token` (empty: every caller) and, by TLS, a certificate that holds; turns the errors of
    handlers into statuses."""

    def __init__(self, token: str, observe: Observe = unobserved, own: Identity | None = None) -> None:
        self._observe = observe
        self._own = own
        self.serving = False
        """What the health check answers to callers without the token."""
        self._expected = f"Bearer {token}".encode() if token else b""
        self._leader = 0
        """Highest epoch of a coordinator that called."""
        self._calls = 0
        self.idle = asyncio.Event()
        """Set while no call is in progress."""
        self.idle.set()
        self._tally = Tally()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if not self._admits(details):
            if details.method == HEALTH_CHECK:
                return grpc.stream_unary_rpc_method_handler(self._health)
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        handler = await continuation(details)
        return None if handler is None else self._guarded(handler, details.method)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        return not self._expected or hmac.compare_digest(_bytes(given), self._expected)

    async def _health(self, requests: object, context: grpc.aio.ServicerContext) -> bytes:
        kinds = health_pb2.HealthCheckResponse
        answer: bytes = kinds(status=kinds.SERVING if self.serving else kinds.NOT_SERVING).SerializeToString()
        return answer

    async def _refuse(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        self._tally.add("caller without the token refused", caller=context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the caller's token is missing or wrong.")

    def _guarded(self, handler: Any, method: str) -> Any:
        """The handler of a method, with its message read and its errors answered here."""

        async def one_reply(raw: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with self._call(context, method):
                return await reply_once(await self._request(raw, handler), context)

        async def replies(raw: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._call(context, method):
                async for reply in reply_often(await self._request(raw, handler), context):
                    yield reply

        write = handler.response_serializer
        reply_often = handler.unary_stream or handler.stream_stream
        if reply_often is not None:
            return grpc.stream_stream_rpc_method_handler(replies, response_serializer=write)
        reply_once = handler.unary_unary or handler.stream_unary
        return grpc.stream_unary_rpc_method_handler(one_reply, response_serializer=write)

    @contextlib.asynccontextmanager
    async def _call(self, context: grpc.aio.ServicerContext, method: str) -> AsyncIterator[None]:
        """One call in progress, within the caller's span; an error ends it with a status."""
        self._calls += 1
        self.idle.clear()
        enter(incoming(dict(context.invocation_metadata() or ())))
        began, code = time.perf_counter(), grpc.StatusCode.OK
        try:
            if self._own is not None:
                self._check_certificate(context)
            self._check_leader(str(dict(context.invocation_metadata() or ()).get(LEADER, "0")))
            yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = grpc.StatusCode.ABORTED
            raise
        except NotImplementedError:  # of the base class of a servicer
            code = grpc.StatusCode.UNIMPLEMENTED
            await context.abort(code, f"{method} is not implemented here.")
        except Exception as error:
            status = self._status(context, error, method)
            code = status[0]
            await context.abort(*status)
        finally:
            self._calls -= 1
            if not self._calls:
                self.idle.set()
            self._observe(method, code.name, time.perf_counter() - began)

    def _check_leader(self, epoch: str) -> None:
        """A coordinator that another one has replaced may wake up in the middle of a call. Raises Fenced."""
        if not epoch.isdecimal() or len(epoch) > LONGEST_EPOCH:
            raise InvalidRequest(f"{LEADER}: {epoch[:40]}: is not an epoch.", "send the epoch of the lease.")
        if 0 < int(epoch) < self._leader:
            what = f"a coordinator with the epoch {epoch} called, and another one leads with the epoch {self._leader}."
            raise Fenced(what, "nothing: the newer one goes on.")
        self._leader = max(self._leader, int(epoch))

    def _check_certificate(self, context: grpc.aio.ServicerContext) -> None:
        """A handshake checks the certificate once, and its connection may last for weeks. Raises Untrusted."""
        assert self._own is not None
        for pem in context.auth_context().get("x509_pem_cert", ()):
            self._own.refresh().callers.check(pem)

    async def _request(self, raw: AsyncIterator[bytes], handler: Any) -> Any:
        """The message of the call; for a method that takes a stream, all its messages as they come."""
        if self._calls > MOST_CALLS:
            raise Unavailable(f"{MOST_CALLS} calls are in progress here.", "call again later.")
        if handler.request_streaming:
            return _messages(raw, handler.request_deserializer)
        message = await _message(raw, handler.request_deserializer)
        if message is None:
            raise InvalidRequest("the call ended without a message.", "send one message.")
        check(message)
        return message

    def _status(
        self, context: grpc.aio.ServicerContext, error: Exception, method: str
    ) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
        """The status that answers an error, which is logged. One that is no MillraceError is a bug: its traceback is
        logged, but not once per call."""
        if not isinstance(error, MillraceError):
            self._tally.add("a bug in this service", key=f"bug {method}", exc_info=error, method=method)
            error = MillraceError(f"{method} failed because of a bug in the service.", "report it with its log.")
        elif isinstance(error, InvalidRequest):
            self._tally.add("message refused", key=method, method=method, caller=context.peer(), error=str(error))
        elif isinstance(error, EXPECTED):
            log.info("call refused", method=method, caller=context.peer(), error=str(error))
        else:
            key = f"{method} {type(error).__name__}"
            self._tally.add("call refused", key=key, method=method, caller=context.peer(), error=str(error))
        return status_of(error)


async def _message(raw: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
    """The next message of a call; None if the caller sends no more. Raises InvalidRequest if it cannot be read,
    or does not come in time."""
    try:
        async with asyncio.timeout(RECEIVE_S):
            data = await anext(raw, None)
    except TimeoutError as error:
        what = f"the message was not sent within {RECEIVE_S:g} s."
        raise InvalidRequest(what, "send it faster, or send less.") from error
    if data is None:
        return None
    try:
        return parse(data)
    except DecodeError as error:
        what = f"a message of {len(data)} bytes is not the protobuf message of this method."
        raise InvalidRequest(what, "run the same release of millrace everywhere.") from error


async def _messages(raw: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    while (message := await _message(raw, parse)) is not None:
        yield message


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
