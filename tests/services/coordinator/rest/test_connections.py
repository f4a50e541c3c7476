"""Callers that send or read too slowly, or too many at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from millrace.wire import http_server
from millrace.wire.http_server import PatientProtocol
from services.coordinator.rest import bodies
from services.coordinator.rest.app import InProgress
from services.coordinator.rest.problems import install

LARGE = 32 << 20


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once: with 32 MiB at /large, else with two bytes. At /slow it takes longer than patience lasts."""
    assert scope["type"] == "http"
    if scope["path"] == "/slow":
        await asyncio.sleep(2.5)
    body = bytes(LARGE) if scope["path"] == "/large" else b"ok"
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Server(uvicorn.Server):
    def install_signal_handlers(self) -> None: ...


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def served(use: Callable[[int, uvicorn.Server], Awaitable[None]]) -> None:
    async def whole() -> None:
        config = uvicorn.Config(answers, port=0, http=PatientProtocol, lifespan="off", log_config=None)
        server = Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(30):
                await use(port, server)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 0.2)


async def cut_off(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def dribble(writer: asyncio.StreamWriter, part: bytes) -> None:
    while True:
        writer.write(part)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"", b""),
        (b"GET / HTT", b""),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"x: y\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n", b"x: y\r\n"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b"x"),
    ],
    ids=["silent", "half a line", "headers", "headers of a second request", "a body after the answer"],
)
def test_a_slow_sender_is_cut_off(begin: bytes, part: bytes) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        dribbling = asyncio.create_task(dribble(writer, part))
        await cut_off(reader)
        dribbling.cancel()
        writer.close()

    served(use)


def test_headers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 60.0)

    async def use(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 64 << 20:
                writer.write(b"x: " + b"y" * 4000 + b"\r\n")
                sent += 4000
                await writer.drain()
        assert sent < 16 << 20
        del reader

    served(use)


def test_a_slow_reader_is_cut_off_and_a_reader_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        request = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(request)
        await until(lambda: bool(server.server_state.connections))
        await until(lambda: not server.server_state.connections)
        assert len(await cut_off(reader)) < LARGE
        writer.close()
        monkeypatch.setattr(http_server, "PATIENCE_S", 2.0)  # less than /slow takes, more than a busy machine waits
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert len((await http.get("/large")).content) == LARGE
            assert (await http.get("/slow")).text == "ok"

    served(use)


def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "RECEIVE_S", 0.1)
    app = FastAPI()
    install(app)

    @app.post("/v1/jobs")
    async def submit(request: Request) -> str:
        return str(await bodies.tree(request))

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(10)
        yield b"}"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post("/v1/jobs", content=slow(), headers={"Content-Type": "application/json"})

    answer = asyncio.run(ask())
    assert answer.status_code == 408 and answer.json()["type"] == "urn:millrace:problem:request-timeout"
    assert answer.headers["connection"] == "close"


def test_requests_in_progress_have_a_bound() -> None:
    async def ask() -> list[httpx.Response]:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await answers(scope, receive, send)

        transport = httpx.ASGITransport(InProgress(waits, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            first = asyncio.create_task(http.get("/v1/jobs"))
            await begun.wait()
            refused = await http.get("/v1/jobs")
            health = asyncio.create_task(http.get("/healthz"))
            go_on.set()
            return [await first, refused, await health, await http.get("/v1/jobs")]

    found = asyncio.run(ask())
    assert [answer.status_code for answer in found] == [200, 429, 200, 200]
    assert found[1].headers["retry-after"] == "1"
    assert found[1].json()["type"] == "urn:millrace:problem:too-many-requests"
