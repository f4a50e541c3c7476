"""Calling another service: deadlines, bounded retries, the shared token, typed errors.

coordinator = Peer("127.0.0.1:7600")
reply = await coordinator.call(FleetRpc.Heartbeat, request)

A coordinator may have several addresses, "host1:7600,host2:7600": one of them leads, the others stand by. The peer
finds the one that leads, and the next one after it has ended or stands still.
"""

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.contracts.method import Request, Response, Streaming, Unary
from millrace.errors import InvalidState, MillraceError, Unavailable, Untrusted, wrong_value
from millrace.telemetry.spans.context import outgoing
from millrace.wire.deadlines import DEADLINES_S
from millrace.wire.status import answered, error_of
from millrace.wire.tls import Identity, identity
from millrace.wire.tls.faults import diagnose

log = structlog.get_logger(__name__)
MAX_MESSAGE_BYTES = 1 << 30
"""Largest answer that a caller takes. What a server takes is its own choice."""
PROTOCOL_VERSION = 1
"""Two services talk to each other only if theirs are equal. Raised with every change of meaning on the wire."""

DIAGNOSE_EVERY_S = 10.0
"""How soon a connection is diagnosed again, while calls to its address fail."""
LEADER_WITHIN_S = 2.0
"""How long an address may take to say whether its coordinator leads."""
LEADER = "millrace-leader"
"""Metadata of a coordinator's calls: the epoch of its lease. A member takes no call of a leader before the newest."""
RETIRE_S = 3600.0
"""How long calls may go on over a channel whose files of TLS have been replaced."""
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
MOST_ADDRESSES = 16
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\],@]+):(\d{1,5})")
"""host:port"""


def addresses(text: str, field: str = "MILLRACE_COORDINATOR") -> list[str]:
    """The addresses, host:port each, in a list with commas; a single one as it is. Raises InvalidState, which names the
    `field`."""
    found = [each.strip() for each in text.split(",")]
    if len(found) == 1:
        return found
    for each in found:
        match = ADDRESS.fullmatch(each)
        if match is None or not 0 < int(match[2]) < 65_536:
            raise _not_addresses(field, text, f"{each or 'an empty address'} is not host:port")
    if len(set(found)) < len(found):
        raise _not_addresses(field, text, "an address comes twice")
    if len(found) > MOST_ADDRESSES:
        raise _not_addresses(field, text, f"holds more than {MOST_ADDRESSES} addresses")
    return found


def _not_addresses(field: str, text: str, reason: str) -> InvalidState:
    wrong = wrong_value(field, text, reason, "write host1:7600,host2:7600: the address of each coordinator once.")
    return InvalidState(wrong.what, wrong.fix)


def token() -> str:
    """The secret that services share, from MILLRACE_TOKEN or the file that MILLRACE_TOKEN_FILE names. Empty: none.

    Raises InvalidState if the file cannot be read, and for a secret that cannot be sent.
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
    """Another service at `address` (host:port), or a coordinator at one of several. Its calls raise MillraceError,
    never gRPC's own errors."""

    def __init__(self, address: str, deadlines: Mapping[str, float] = DEADLINES_S, leader: int = 0) -> None:
        """`leader`: the epoch of the coordinator that calls. Raises InvalidState for several addresses of which one is
        none."""
        self._addresses = addresses(address)
        self.address = self._addresses[0]
        """The address that calls go to."""
        self.deadlines = deadlines
        self._identity = identity()
        self._line = _Line(self.address, self._identity)
        self._finding: asyncio.Task[None] | None = None
        """Looks for the coordinator that leads."""
        self._diagnosed = (-math.inf, cast(Untrusted | None, None))
        """When a connection was diagnosed last, and what was found."""
        secret = token()
        self._metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {secret}"),) if secret else ()
        if leader:
            self._metadata += ((LEADER, str(leader)),)

    async def call(self, method: Unary[Request, Response], request: Request, *, attempts: int = 1) -> Response:
        """One unary call, within its deadline. With `attempts` > 1, for idempotent calls only, an address that cannot
        be reached is tried again, after waits that grow to at most 2 s."""
        for attempt in range(1, attempts + 1):
            try:
                return await self._once(method, request)
            except Unavailable:
                if attempt == attempts:
                    raise
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("attempts is at least 1")

    async def _once(self, method: Unary[Request, Response], request: Request) -> Response:
        deadline_s, line = self.deadlines[method.key], await self._current()
        try:
            metadata = (*self._metadata, *outgoing())
            reply: Response = await line.unary(method)(request, timeout=deadline_s, metadata=metadata)
            return reply
        except grpc.aio.UsageError as failure:  # the channel was closed before the call began
            raise Unavailable(f"the channel to {line.address} was closed before {method.key}.") from failure
        except grpc.aio.AioRpcError as failure:
            raise await self._failed(failure, line, method.key, deadline_s) from failure
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if line.left and caller is not None and not caller.cancelling():
                what = f"the coordinator at {line.address} does not lead any more, {self.address} does."
                raise Unavailable(what, f"repeat {method.key}.") from None
            raise

    async def stream(self, method: Streaming[Request, Response], request: Request) -> AsyncIterator[Response]:
        """The replies of one server-streaming call, within its deadline."""
        deadline_s, line = self.deadlines[method.key], await self._current()
        call = line.channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            async for reply in call(request, timeout=deadline_s, metadata=(*self._metadata, *outgoing())):
                yield reply
        except grpc.aio.AioRpcError as failure:
            raise await self._failed(failure, line, method.key, deadline_s) from failure

    async def _failed(
        self, failure: grpc.aio.AioRpcError, line: "_Line", method: str, deadline_s: float
    ) -> MillraceError:
        """The error of a failed call. Where another address leads, later calls go there."""
        error = await self._explained(failure, error_of(failure, line.address, method, deadline_s))
        if isinstance(error, Unavailable) and len(self._addresses) > 1 and line is self._line:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.create_task(self._find_leader())
            await asyncio.shield(self._finding)
        return error

    async def _find_leader(self) -> None:
        """Asks all other addresses at once. The first that leads gets the calls; those in progress end."""
        asked = [asyncio.create_task(_leads(each)) for each in self._addresses if each != self.address]
        try:
            for answer in asyncio.as_completed(asked):
                if address := await answer:
                    log.info("another coordinator leads", before=self.address, now=address)
                    before, self.address = self._line, address
                    self._line = _Line(address, self._identity)
                    before.leave()
                    return
        finally:
            for each in asked:
                each.cancel()

    async def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
        await self._line.close()

    async def _current(self) -> "_Line":
        """The channel with the files of TLS as they are now. Raises Untrusted."""
        own = self._identity
        if own is None or (own.refresh().number == self._line.number and self._line.checked):
            return self._line
        if own.number != self._line.number:
            self._line.retire()
            self._line = _Line(self.address, own)
        if own.contents.crl:  # gRPC itself looks at no list of revoked certificates
            error = await self._diagnose()
            if error is not None:
                raise error
        self._line.checked = True
        return self._line

    async def _explained(self, failure: grpc.aio.AioRpcError, error: MillraceError) -> MillraceError:
        """The error of a call, or the fault of TLS that it comes from."""
        if failure.code() is not grpc.StatusCode.UNAVAILABLE or answered(failure):
            return error
        at, known = self._diagnosed
        if time.monotonic() - at > DIAGNOSE_EVERY_S:
            known = await self._diagnose()
            self._diagnosed = time.monotonic(), known
        return error if known is None else known

    async def _diagnose(self) -> Untrusted | None:
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal():
            return None
        return await asyncio.to_thread(diagnose, host, int(port))


class _Line:
    """A channel with the files of TLS of one moment."""

    def __init__(self, address: str, own: Identity | None) -> None:
        self.address, self.channel = address, open_channel(grpc.aio, address)
        self.number = 0 if own is None else own.number
        self.left = False
        """Whether it was closed because another address leads."""
        self.checked = False
        """Whether the server's certificate was looked up in the list of revoked ones."""
        self._calls: dict[str, Any] = {}
        """The channel's callable for each method."""

    def unary(self, method: Unary[Request, Response]) -> Any:
        if method.key not in self._calls:
            self._calls[method.key] = self.channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return self._calls[method.key]

    def retire(self) -> None:
        """Closes the channel when the calls in progress have ended."""
        self._close_within(RETIRE_S)

    def leave(self) -> None:
        """Closes the channel, which ends the calls in progress."""
        self.left = True
        self._close_within(None)

    def _close_within(self, seconds: float | None) -> None:
        closing = asyncio.create_task(self.channel.close(seconds))
        _RETIRING.add(closing)
        closing.add_done_callback(_RETIRING.discard)

    async def close(self) -> None:
        await self.channel.close()


_RETIRING: set["asyncio.Task[None]"] = set()


async def _leads(address: str) -> str:
    """The address, if the coordinator there leads; empty otherwise."""
    channel = open_channel(grpc.aio, address)
    try:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply = await check(health_pb2.HealthCheckRequest(), timeout=LEADER_WITHIN_S)
        return address if reply.status == health_pb2.HealthCheckResponse.SERVING else ""
    except grpc.aio.AioRpcError:
        return ""
    finally:
        await channel.close()


def open_channel(module: Any, address: str) -> Any:
    """A channel of `module`, grpc or grpc.aio, to a service of this deployment: by TLS if this process has it."""
    own = identity()
    if own is None:
        return module.insecure_channel(address, options=OPTIONS)
    return module.secure_channel(address, own.channel_credentials(), options=[*OPTIONS, *own.channel_options()])
