"""Proxies of the environment: never between the services, and as the environment says to places outside."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace
from millrace.contracts.methods import WorkRpc
from millrace.contracts.v1 import work_pb2, work_pb2_grpc
from millrace.wire import probe
from millrace.wire.channel import Peer
from millrace.wire.reach import is_loopback, may_take_proxy, past_proxies
from millrace.wire.server import Server

ROOT = Path(millrace.__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
CLIENTS = {"insecure_channel": "options", "AsyncClient": "trust_env", "Client": "trust_env", "connect": "proxy"}
"""What makes a connection that follows the environment's proxies by itself, and the argument that says otherwise."""


class Work(work_pb2_grpc.WorkServicer):
    async def Lease(self, request, context):
        return work_pb2.LeaseResponse()


@pytest.mark.parametrize("variable", ["http_proxy", "grpc_proxy"])
def test_services_reach_each_other_past_a_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, NOWHERE)

    async def scenario() -> None:
        add = {"millrace.v1.Work": lambda server: work_pb2_grpc.add_WorkServicer_to_server(Work(), server)}
        server = Server(add, "127.0.0.1", 0)
        await server.start()
        peer = Peer(f"127.0.0.1:{server.port}", {WorkRpc.Lease.key: 10.0})
        try:
            await peer.call(WorkRpc.Lease, work_pb2.LeaseRequest())
            healthy, answer = await asyncio.to_thread(probe.serving, f"127.0.0.1:{server.port}")
            assert healthy, answer
        finally:
            await peer.close()
            await server.stop(0.1)

    asyncio.run(scenario())


def test_every_client_says_whether_it_takes_a_proxy() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("millrace", "services")
        for path in (ROOT / folder).rglob("*.py")
        for call, argument in _clients(path)
        if argument not in {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def _clients(path: Path) -> Iterator[tuple[ast.Call, str]]:
    text = path.read_text(encoding="utf-8")
    if not any(library in text for library in ("import httpx", "import grpc", "from websockets")):
        return
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        match call.func:
            case ast.Attribute(value=ast.Name(id="httpx" | "httpx2"), attr="AsyncClient" | "Client" as name):
                yield call, CLIENTS[name]
            case ast.Attribute(attr="insecure_channel" as name) | ast.Name(id="connect" as name):
                yield call, CLIENTS[name]


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("http://127.0.0.1:8000/v1", False),
        ("http://localhost:8000", False),
        ("ws://[::1]:9000/ws", False),
        ("https://judge.example.org/v1", True),
        ("http://10.0.0.4:8000", True),
    ],
)
def test_a_place_outside_is_reached_as_the_environment_says(url: str, may: bool) -> None:
    assert may_take_proxy(url) is may


def test_a_program_reaches_its_session_past_proxies() -> None:
    told = past_proxies("http://10.0.0.4:7630/sessions/1", {"no_proxy": "a.example, b.example"})
    assert told == {"no_proxy": "a.example,b.example,10.0.0.4", "NO_PROXY": "a.example,b.example,10.0.0.4"}
    assert past_proxies("http://10.0.0.4:1", told) == told
    assert past_proxies("http://10.0.0.4:1", {"NO_PROXY": "*"})["no_proxy"] == "*"
    assert is_loopback("127.0.0.3")
