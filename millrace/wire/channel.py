"""Calling another service: deadlines, bounded retries, the shared token, typed errors.

coordinator = Peer("127.0.0.1:7600")
reply = await coordinator.call(FleetRpc.Heartbeat, request)
"""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from millrace.contracts.method import Request, Response, Streaming, Unary
from millrace.errors import InvalidState, Unavailable
from millrace.telemetry.spans.context import outgoing
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.status import error_of

MAX_MESSAGE_BYTES = 1 << 30
"""Largest answer that a caller takes. What a server takes is its own choice."""
PROTOCOL_VERSION = 1
"""Two services talk to each other only if theirs are equal. Raised with every change of meaning on the wire."""

OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # by default http_proxy counts, for the loopback too
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # By default a server ends a connection that pings more often than every five minutes: long calls would break.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_metadata_size", 32 << 10),  # the texts of an error, escaped
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long one attempt to connect may take, 20 s by default: one that began while a link was cut never succeeds.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


def token() -> str:
    """The secret that services share, from MILLRACE_TOKEN or the file that MILLRACE_TOKEN_FILE names. Empty: none.

    Raises InvalidState where the file cannot be read, and for a secret that cannot be sent.
    """
    secret = os.environ.get("MILLRACE_TOKEN", "")
    if path := os.environ.get("MILLRACE_TOKEN_FILE"):
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                secret = file.read().strip()
        except OSError as error:
            fix = "give a file that holds the token and can be read, or set MILLRACE_TOKEN instead."
            raise InvalidState(f"MILLRACE_TOKEN_FILE: {json.dumps(path)}: {error.strerror}.", fix) from error
    return sendable(secret)


def sendable(secret: str) -> str:
    """The secret, if it can be the value of a header. Raises InvalidState."""
    if not re.fullmatch(r"[!-~]*", secret):
        fix = "set the same token of ASCII characters for all services and clients: `openssl rand -hex 32` makes one."
        raise InvalidState("MILLRACE_TOKEN: holds a space or a character that is not ASCII.", fix)
    return secret


class Peer:
    """Another service at `address` (host:port). Its calls raise MillraceError, never gRPC's own errors."""

    def __init__(self, address: str, deadlines: Mapping[str, float] = DEADLINES_S) -> None:
        self.address = address
        self.deadlines = deadlines
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        secret = token()
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        self._calls: dict[str, Any] = {}
        """The channel's callable for each method."""

    async def call(self, method: Unary[Request, Response], request: Request, *, attempts: int = 1) -> Response:
        """One unary call, within its deadline. With `attempts` > 1, for idempotent calls only, an address that cannot
        be reached is tried again, after waits that grow to at most 2 s."""
        deadline_s = self.deadlines[method.key]
        if method.key not in self._calls:
            self._calls[method.key] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        call = self._calls[method.key]
        for attempt in range(1, attempts + 1):
            try:
                reply: Response = await call(request, timeout=deadline_s, metadata=(*self._metadata, *outgoing()))
                return reply
            except grpc.aio.UsageError as failure:  # the channel was closed before the call began
                raise Unavailable(f"the channel to {self.address} was closed before {method.key}.") from failure
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure, self.address, method.key, deadline_s)
                if not isinstance(error, Unavailable) or attempt == attempts:
                    raise error from failure
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("attempts is at least 1")

    async def stream(self, method: Streaming[Request, Response], request: Request) -> AsyncIterator[Response]:
        """The replies of one server-streaming call, within its deadline."""
        deadline_s = self.deadlines[method.key]
        call = self._channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            async for reply in call(request, timeout=deadline_s, metadata=(*self._metadata, *outgoing())):
                yield reply
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self.address, method.key, deadline_s) from failure

    async def close(self) -> None:
        await self._channel.close()
