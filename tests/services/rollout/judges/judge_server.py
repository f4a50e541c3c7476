"""An OpenAI-compatible endpoint on a port of this machine, which answers, fails and hangs as a test tells it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[[dict[str, Any]], "str | Failure"]


@dataclass(frozen=True)
class Failure:
    """What the endpoint does instead of answering with 200."""

    status: int = 500
    """0: it closes the connection. -1: it never answers."""
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"error": "broken"}'


CLOSES, HANGS = Failure(0), Failure(-1)


class JudgeServer:
    """`reply` says what is answered to a request; `asked` has the requests, `headers` those of the last one."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.arrived = asyncio.Queue[None]()
        """Gets an item with each request."""
        self.at_once = 0
        self.most_at_once = 0
        self.gate = asyncio.Event()
        """Answers wait until it is set."""
        self.gate.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def up(self) -> None:
        """Listens, at the port that it had before if there is one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Refuses connections."""
        assert self._server is not None
        self._server.close()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = json.loads(await reader.readexactly(int(self.headers["content-length"])))
            assert first == "POST /v1/chat/completions HTTP/1.1"
            self.asked.append(body)
            self.arrived.put_nowait(None)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self.gate.wait()
                await self._answer(writer, self.reply(body))
            finally:
                self.at_once -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, told: str | Failure) -> None:
        if isinstance(told, str):
            told = Failure(200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": told}}]}))
        if told.status == -1:
            await asyncio.sleep(3600)
        if told.status <= 0:
            return
        payload = told.body.encode()
        headers = {"Content-Length": str(len(payload)), "Connection": "close", **told.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {told.status} Told\r\n{lines}\r\n".encode() + payload)
        await writer.drain()


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[JudgeServer]:
    server = JudgeServer(reply)
    await server.up()
    try:
        yield server
    finally:
        if server._server is not None:
            server._server.close()


def said(body: dict[str, Any]) -> str:
    """The user's message of a request."""
    return str(body["messages"][-1]["content"])
