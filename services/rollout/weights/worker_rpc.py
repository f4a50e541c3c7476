"""Calls from a replica into its engine's worker processes: frames on a socket, answered by a thread in each.

On one host it is a Unix socket that only the replica's user can open. If the engine lies on several hosts, it is a
TCP socket, by mutual TLS if the replica has an identity, and a worker shows the secret that it got with the address.

An engine's own call into its workers waits for the batch that runs, which is one step of generation each time, and
SGLang's returns only one rank's success. This one does not wait, except for methods that have to run between batches.
"""

import asyncio
import contextlib
import hmac
import itertools
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple

import structlog

from millrace.errors import MillraceError, Unavailable
from millrace.local.folders import short_root
from millrace.wire.address import bind_address
from millrace.wire.tls import Use, server_context
from millrace.wire.tls.tunnel import way_to
from services.rollout.weights.worker_messages import (
    Introduction,
    Reply,
    Request,
    Welcome,
    carry_out,
    decode,
    decode_reply,
    decode_request,
    encode,
)
from services.rollout.weights.worker_methods import WorkerMethods

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")
RPC_S = 60.0
"""Limit of one call. No method waits for anything but its own work."""
HEADER = struct.Struct("!I")
SOCKET = "MILLRACE_WORKER_RPC"
"""Environment variable with the replica's address, for workers that get it in no other way."""
TCP = "tcp://"
INTRODUCTION_BYTES = 64 << 10
"""Bytes of the largest introduction. Its sender has not shown the secret yet."""
INTRODUCE_S = 10.0
"""Limit of the time to connect, and to introduce oneself."""
log = structlog.get_logger(__name__)


class WorkerDied(MillraceError):
    """The process of a worker ended during a call."""


class Workers(Protocol):
    """`method` is one of `WorkerMethods`; the answers come in the order of the ranks."""

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """Calls the method in every worker, during generation. A method of BETWEEN_BATCHES, and any with `paused`,
        runs in the thread that generates: between two batches, and with `paused` once generation has stopped.

        Raises PublicationFailed for the first worker that failed, WorkerDied if a worker is gone, Unavailable if
        one does not answer in time.
        """


class InProcessWorker:
    """The one worker of an engine that computes in the replica's own process. Its methods run in a thread of the
    event loop's pool; the caller has paused generation for those that need it."""

    def __init__(self, receiver: WorkerMethods) -> None:
        self._receiver = receiver

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """See `Workers`."""
        request = Request(0, method.__name__, arguments, paused, float("inf"))
        reply = await asyncio.to_thread(carry_out, self._receiver, request)
        return [reply.result(method)]


class WorkerRpc:
    """The replica's end of the connections to all workers. See `Workers`."""

    def __init__(self, engine: str) -> None:
        """`engine` is the engine's name for people."""
        self._engine = engine
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._secret = ""
        """What a worker has to show; empty for a socket of this host."""
        self._server: asyncio.Server | None = None
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        """Keyed by rank, as are the introductions."""
        self._introductions: dict[int, Introduction] = {}
        self._connected = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()

    async def listen(self, host: str = "") -> str:
        """Starts to listen; returns the address, which the workers need. `host`: the address by which workers of other
        hosts reach this one; empty if there are none."""
        if host:
            self._secret = secrets.token_hex(16)
            tls = server_context(Use.MEMBERS)
            self._server = await asyncio.start_server(self._accept, bind_address(host), 0, ssl=tls)
            return f"{TCP}{self._secret}@{host}:{self._server.sockets[0].getsockname()[1]}"
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-", dir=short_root())  # open to its owner only
        path = str(Path(self._folder.name) / "workers")
        self._server = await asyncio.start_unix_server(self._accept, path)
        return path

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(INTRODUCE_S):
                introduction = Introduction(**decode(await _read_frame(reader, INTRODUCTION_BYTES)))
        except (TimeoutError, EOFError, OSError, ValueError, TypeError) as error:
            log.warning("a connection that introduced no worker was closed", error=str(error))
            writer.close()
            return
        if not hmac.compare_digest(introduction.secret.encode(), self._secret.encode()):
            log.warning("a worker without the secret was refused", peer=writer.get_extra_info("peername"))
            writer.close()
            return
        writer.write(_frame(Welcome(time.monotonic())))
        async with self._connected:
            self._streams[introduction.rank] = (reader, writer)
            self._introductions[introduction.rank] = introduction
            self._connected.notify_all()

    async def wait_for_workers(self, count: int, within_s: float) -> list[Introduction]:
        """The introductions of `count` workers. Raises Unavailable if one does not connect in time."""
        try:
            async with asyncio.timeout(within_s), self._connected:
                await self._connected.wait_for(lambda: len(self._streams) == count)
        except TimeoutError as error:
            what = f"{len(self._streams)} of {count} workers of {self._engine} connected within {within_s:g} s."
            raise Unavailable(what, f"see {self._engine}'s log above.") from error
        return [self._introductions[rank] for rank in range(count)]

    async def ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        name = method.__name__
        request = Request(next(self._numbers), name, arguments, paused, time.monotonic() + RPC_S)
        frame = _frame(request)
        try:
            async with asyncio.timeout(RPC_S), self._turn:
                for _, writer in self._streams.values():
                    writer.write(frame)
                    await writer.drain()
                replies = [await _reply_to(request, self._streams[rank][0]) for rank in sorted(self._streams)]
        except TimeoutError as error:
            raise Unavailable(f"{self._engine}'s workers did not answer {name} within {RPC_S:g} s.") from error
        except (EOFError, OSError) as error:
            raise WorkerDied(f"a worker of {self._engine} ended during {name}: {error}") from error
        return [reply.result(method) for reply in replies]

    async def close(self) -> None:
        """Closes every connection and the socket. Idempotent."""
        for _, writer in self._streams.values():
            writer.close()
        self._streams = {}
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class WorkerRpcServer:
    """A worker's end of its connection. `carry_out` is called with every request, in the server's thread; it returns
    the reply, or None if it has arranged that `reply` is called later."""

    def __init__(self, place: str, introduction: Introduction, carry_out: Callable[[Request], Reply | None]) -> None:
        """`place` is what `WorkerRpc.listen` answered. Raises Unavailable if the replica cannot be reached."""
        import torch

        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._socket, secret = _connect(place)
        asked = time.monotonic()
        self._socket.sendall(_frame(replace(introduction, secret=secret)))
        self._stream = self._socket.makefile("rb")
        clock = self._welcome()
        self._ahead_s = clock - asked if self._socket.family != socket.AF_UNIX else 0.0
        """Seconds by which the replica's clock is ahead of this one's: hosts count time.monotonic() from different
        days. Over the network this is too much by the time of the introduction: nothing is carried out that was given
        up."""
        # A new thread starts on the first GPU, whichever GPU its worker uses.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._listen, name="millrace worker rpc", daemon=True).start()

    def reply(self, reply: Reply) -> None:
        """Sends a reply, if the replica still listens. Called from any thread."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(_frame(reply))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _welcome(self) -> float:
        """The replica's clock, which is its answer to the introduction."""
        try:
            if header := self._stream.read(HEADER.size):
                clock = Welcome(**decode(self._stream.read(HEADER.unpack(header)[0]))).clock
                self._socket.settimeout(None)
                return clock
        except OSError as error:
            raise Unavailable(f"the replica has not let this worker in: {error}.") from error
        raise Unavailable("the replica has not let this worker in.", "see the replica's log.")

    def _listen(self) -> None:
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)
        with contextlib.suppress(OSError):
            while header := self._stream.read(HEADER.size):
                request = decode_request(self._stream.read(HEADER.unpack(header)[0]))
                request = replace(request, deadline=request.deadline - self._ahead_s)
                if not request.expired and (reply := self._carry_out(request)) is not None:
                    self.reply(reply)


def _connect(place: str) -> tuple[socket.socket, str]:
    """The connection to a replica, and the secret to show there."""
    try:
        if not place.startswith(TCP):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(INTRODUCE_S)
            connection.connect(place)
            return connection, ""
        secret, _, address = place.removeprefix(TCP).partition("@")
        host, _, port = address.rpartition(":")
        connection = socket.create_connection(way_to(host, int(port), INTRODUCE_S), INTRODUCE_S)
    except OSError as error:
        what = f"this worker cannot reach its replica: {error}."
        raise Unavailable(what, "let the hosts of one replica reach each other on all ports.") from error
    # A host that is gone closes no connection.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection, secret


def _frame(message: Introduction | Welcome | Request | Reply) -> bytes:
    """The length of the encoded message, then the message."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


async def _read_frame(reader: asyncio.StreamReader, largest: int = 1 << 32) -> bytes:
    """Raises ValueError for one of more than `largest` bytes."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if length > largest:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def _reply_to(request: Request, reader: asyncio.StreamReader) -> Reply:
    """The reply of one worker. Replies to earlier requests that timed out are skipped."""
    while (reply := decode_reply(await _read_frame(reader))).number != request.number:
        continue
    return reply
