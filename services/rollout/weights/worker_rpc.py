"""Calls from a replica into its engine's worker processes: frames on a Unix socket, answered by a thread in each.

An engine's own call into its workers waits for the batch that runs, which is one step of generation each time, and
SGLang's returns only one rank's success. This one does not wait, except for methods that have to run between batches.
"""

import asyncio
import contextlib
import itertools
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from millrace.errors import Unavailable
from services.rollout.weights.worker_messages import (
    Introduction,
    Reply,
    Request,
    decode_introduction,
    decode_reply,
    decode_request,
    encode,
)
from services.rollout.weights.workers import WorkerDied

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")
RPC_S = 60.0
"""Limit of one call. No method waits for anything but its own work."""
HEADER = struct.Struct("!I")
SOCKET = "MILLRACE_WORKER_RPC"
"""Environment variable with the socket's path, for workers that are told nothing else."""


class WorkerRpc:
    """The replica's end of the connections to all workers. See `Workers`."""

    def __init__(self, engine: str) -> None:
        """`engine` is the engine's name for people."""
        self._engine = engine
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: asyncio.Server | None = None
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        """Keyed by rank, as are the introductions."""
        self._introductions: dict[int, Introduction] = {}
        self._connected = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()

    async def listen(self) -> str:
        """Starts to listen; the socket's path, which the workers have to be told."""
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-")  # open to its owner only
        path = str(Path(self._folder.name) / "workers")
        self._server = await asyncio.start_unix_server(self._accept, path)
        return path

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        introduction = decode_introduction(await _read_frame(reader))
        async with self._connected:
            self._streams[introduction.rank] = (reader, writer)
            self._introductions[introduction.rank] = introduction
            self._connected.notify_all()

    async def wait_for_workers(self, count: int, within_s: float) -> list[Introduction]:
        """The introductions of `count` workers. Raises Unavailable where one does not connect in time."""
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
        """See `Workers`."""
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
    the reply, or None where it has arranged that `reply` is called later."""

    def __init__(self, path: str, introduction: Introduction, carry_out: Callable[[Request], Reply | None]) -> None:
        import torch

        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(_frame(introduction))
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

    def _listen(self) -> None:
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)
        stream = self._socket.makefile("rb")
        with contextlib.suppress(OSError):
            while header := stream.read(HEADER.size):
                request = decode_request(stream.read(HEADER.unpack(header)[0]))
                if not request.expired and (reply := self._carry_out(request)) is not None:
                    self.reply(reply)


def _frame(message: Introduction | Request | Reply) -> bytes:
    """The length of the encoded message, then the message."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


async def _reply_to(request: Request, reader: asyncio.StreamReader) -> Reply:
    """The reply of one worker. Replies to earlier requests that timed out are skipped."""
    while (reply := decode_reply(await _read_frame(reader))).number != request.number:
        continue
    return reply
