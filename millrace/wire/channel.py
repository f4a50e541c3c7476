"""Calling another service: deadlines, bounded retries, the shared token, typed errors.

coordinator = Peer("127.0.0.1:7600")
reply = await coordinator.call(FleetStub, "Heartbeat", request)
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from millrace.errors import Unavailable
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.status import error_of

MAX_MESSAGE_BYTES = 1 << 30
PROTOCOL_VERSION = 1
"""Two services talk only if theirs are equal. Raised with every change of meaning on the wire."""

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server by itself ends a connection that pings more often than every five minutes: long calls would break.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def token() -> str:
    """The secret that services share, from MILLRACE_TOKEN or the file that MILLRACE_TOKEN_FILE names; empty: none."""
    if path := os.environ.get("MILLRACE_TOKEN_FILE"):
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    return os.environ.get("MILLRACE_TOKEN", "")


class Peer:
    """Another service at `address` (host:port). Its calls raise MillraceError, never gRPC's own errors."""

    def __init__(self, address: str, deadlines: Mapping[str, float] = DEADLINES_S) -> None:
        self.address = address
        self.deadlines = deadlines
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stubs: dict[type, Any] = {}
        secret = token()
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()

    async def call(self, stub: type, method: str, request: Any, *, attempts: int = 1) -> Any:
        """One unary call under its deadline. With `attempts` > 1 (idempotent calls only) an address that cannot be
        reached is tried again, with growing waits of at most 2 s."""
        name = f"{stub.__name__.removesuffix('Stub')}/{method}"
        for attempt in range(1, attempts + 1):
            try:
                return await self._bound(stub, method)(request, timeout=self.deadlines[name], metadata=self._metadata)
            except grpc.aio.UsageError as failure:  # somebody closed it before the call began
                raise Unavailable(f"the channel to {self.address} was closed before {name}.") from failure
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure, self.address, name, self.deadlines[name])
                if not isinstance(error, Unavailable) or attempt == attempts:
                    raise error from failure
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("attempts is at least 1")

    async def stream(self, stub: type, method: str, request: Any) -> AsyncIterator[Any]:
        """The replies of one server-streaming call under its deadline."""
        name = f"{stub.__name__.removesuffix('Stub')}/{method}"
        try:
            async for reply in self._bound(stub, method)(
                request, timeout=self.deadlines[name], metadata=self._metadata
            ):
                yield reply
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self.address, name, self.deadlines[name]) from failure

    def _bound(self, stub: type, method: str) -> Any:
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        return getattr(self._stubs[stub], method)

    async def close(self) -> None:
        await self._channel.close()
