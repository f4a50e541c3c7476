"""The HTTP server of a host of environments, with an environment of the tests, and what the host imports."""

import ast
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.environments import server
from services.environments.messages import Branch, EpisodeRequest, PlayedEpisode
from services.environments.server import Desk, application

FOLDER = Path(__file__).parents[3] / "services/environments"
ALLOWED = {*sys.stdlib_module_names, "starlette", "uvicorn", "verifiers"}
SHARED = "millrace.wire.reach"
REQUEST: dict[str, Any] = {
    "task": {"idx": 0},
    "url": "http://replica/sessions/x",
    "key": "k",
    "model": "m",
    "renderer": {"name": "default"},
    "seconds": 9.0,
    "temperature": 1.0,
}


def test_the_host_needs_nothing_of_the_other_services_and_no_other_library() -> None:
    files = [*FOLDER.glob("*.py"), FOLDER.parents[1] / f"{SHARED.replace('.', '/')}.py"]
    assert len(files) > 4
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name == SHARED or name.startswith("services.environments.")
                assert own or name.partition(".")[0] in ALLOWED, (file, name)


class Waiting:
    """An environment whose episodes end when they are told to."""

    name = "waiting"

    def __init__(self) -> None:
        self.begun, self.end, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.asked: list[EpisodeRequest] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, asked: EpisodeRequest) -> PlayedEpisode:
        self.asked.append(asked)
        self.begun.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return PlayedEpisode(0.5, {"won": 1.0}, "", [Branch([1, 2, 3], [(1, 3)])])


def client(environment: Waiting, secret: str = "") -> httpx.AsyncClient:
    app = application(environment, 1, secret)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host")


def test_an_episode_is_run_and_told() -> None:
    async def scenario() -> None:
        environment = Waiting()
        async with client(environment) as http:
            episode = asyncio.create_task(http.post("/episodes", json=REQUEST))
            await environment.begun.wait()
            assert (await http.get("/health")).json() == {"environment": "waiting", "running": 1}
            environment.end.set()
            answer = (await episode).json()
            assert answer.pop("branches") == [{"tokens": [1, 2, 3], "sampled": [[1, 3]]}]
            assert answer == {"reward": 0.5, "metrics": {"won": 1.0}, "error": ""}
            assert environment.asked == [EpisodeRequest(**REQUEST)]
            assert (await http.get("/health")).json()["running"] == 0

    asyncio.run(scenario())


def test_an_episode_ends_with_its_caller() -> None:
    async def scenario() -> None:
        environment = Waiting()
        desk = Desk(environment, 1, "")

        class Request:
            def __init__(self) -> None:
                self.headers = dict[str, str]()

            async def stream(self) -> AsyncIterator[bytes]:
                yield json.dumps(REQUEST).encode()

            async def receive(self) -> dict[str, str]:
                await environment.begun.wait()
                return {"type": "http.disconnect"}

        answer = await desk.episode(Request())  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await environment.cancelled.wait()
        assert answer.status_code == 499

    asyncio.run(scenario())


def test_a_caller_needs_the_token_and_a_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with client(Waiting(), "secret") as http:
            for header in ({}, {"authorization": "Bearer other"}):
                assert (await http.post("/episodes", json=REQUEST, headers=header)).status_code == 401
            header = {"authorization": "Bearer secret"}
            deep = b"[" * 100_000 + b"]" * 100_000
            for body in (b"{", b"[]", b'{"task": {}}', b"\xff", deep, b'{"task": ' + deep + b"}"):
                reply = await http.post("/episodes", content=body, headers=header)
                assert reply.status_code == 400 and reply.json()["error"]
            monkeypatch.setattr(server, "LARGEST_BODY", 1 << 20)
            reply = await http.post("/episodes", content=b" " * (2 << 20), headers=header)
            assert reply.status_code == 413 and reply.json()["error"] == "the body has more than 1 MiB"

    asyncio.run(scenario())
