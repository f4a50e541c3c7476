"""The replica's own way into an engine's workers: frames of JSON on a Unix socket, answered by a thread of each.

An engine's own call into its workers waits for the batch that runs, a step of generation every time, and SGLang's
answers one rank's success and no data. This one waits for nobody, except for what has to lie between two batches.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.errors import Unavailable
from services.rollout.engine import EngineDied
from services.rollout.engines.worker_engine import Answers, raise_failed

RPC_S = 60.0
"""For one call into the workers. None of them waits for anything but its own work."""
HEADER = struct.Struct("!I")
SOCKET = "MILLRACE_INLETS"
"""Environment variable with the socket's path, for workers that are told nothing else."""
Request = dict[str, Any]
Answer = dict[str, Any]


class Inlets:
    """The replica's end of all of them, by rank."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: asyncio.Server | None = None
        self._ranks: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._introductions: dict[int, dict[str, Any]] = {}
        self._met = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()

    async def listen(self) -> str:
        """The socket's path, which the workers have to be told."""
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-")  # open to its owner only
        path = str(Path(self._folder.name) / "inlet")
        self._server = await asyncio.start_unix_server(self._welcome, path)
        return path

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = await _frame(reader)
        async with self._met:
            self._ranks[told["rank"]], self._introductions[told["rank"]] = (reader, writer), told
            self._met.notify_all()

    async def meet(self, count: int, within_s: float) -> list[dict[str, Any]]:
        """What each of `count` ranks says of itself. Raises Unavailable where one does not come."""
        try:
            async with asyncio.timeout(within_s), self._met:
                await self._met.wait_for(lambda: len(self._ranks) == count)
        except TimeoutError as error:
            what = f"{len(self._ranks)} of {count} workers of {self._engine} opened an inlet within {within_s:g} s."
            raise Unavailable(what, f"see {self._engine}'s log above.") from error
        return [self._introductions[rank] for rank in range(count)]

    async def ask(self, method: str, *arguments: Any, paused: bool = False) -> Answers:
        """One call into every rank, carried out once it stands `paused` if that is asked for. Raises PublicationFailed
        for the first that failed, EngineDied where a rank is gone."""
        number = next(self._numbers)
        told = {"method": method, "arguments": arguments, "paused": paused, "number": number}
        request = encode({**told, "until": time.monotonic() + RPC_S})
        try:
            async with asyncio.timeout(RPC_S), self._turn:
                for _, writer in self._ranks.values():
                    writer.write(request)
                    await writer.drain()
                answers = [await _answer(self._ranks[rank][0], number) for rank in sorted(self._ranks)]
        except TimeoutError as error:
            raise Unavailable(f"{self._engine}'s workers did not answer {method} within {RPC_S:g} s.") from error
        except (EOFError, OSError) as error:
            raise EngineDied(f"a worker of {self._engine} ended during {method}: {error}") from error
        return raise_failed(answers)

    async def close(self) -> None:
        for _, writer in self._ranks.values():
            writer.close()
        self._ranks = {}
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


async def _answer(reader: asyncio.StreamReader, number: int) -> Answer:
    """The answer to call `number`; those to calls that were given up before it are read past."""
    while (answer := await _frame(reader)).pop("number") != number:
        continue
    return answer


async def _frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return decode(await reader.readexactly(length))


class Inlet:
    """A worker's end. `carry_out` is called with every request in a thread of its own and answers it, or answers None
    and sees to it that `answer` is called later."""

    def __init__(self, path: str, introduction: dict[str, Any], carry_out: Callable[[Request], Answer | None]) -> None:
        import torch

        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(encode(introduction))
        # A new thread is on the first GPU, whichever its worker is on.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._listen, name="millrace inlet", daemon=True).start()

    def answer(self, request: Request, answer: Answer) -> None:
        with self._lock, contextlib.suppress(OSError):  # nobody asks any more
            self._socket.sendall(encode({**answer, "number": request["number"]}))

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
                request = decode(stream.read(HEADER.unpack(header)[0]))
                if expired(request):
                    continue
                if (answer := self._carry_out(request)) is not None:
                    self.answer(request, answer)


def carried_out(receiver: Any, request: Request) -> Answer:
    """What the receiver's method answers. Whatever goes wrong, the replica has to hear of it."""
    try:
        answer: Answer = getattr(receiver, request["method"])(*request["arguments"])
        return answer
    except Exception as error:
        return {"failed": f"{request['method']} failed in the engine: {type(error).__name__}: {error}", "fix": ""}


def expired(request: Request) -> bool:
    """Whether the replica, which is on this host, has given up waiting for the answer."""
    return time.monotonic() > float(request["until"])


def encode(message: dict[str, Any]) -> bytes:
    """A frame: its length, then JSON; bytes as base64 under `bytes`."""
    body = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(body, object_hook=_whole)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    return int(value)


def _whole(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["bytes"]) if found.keys() == {"bytes"} else found
