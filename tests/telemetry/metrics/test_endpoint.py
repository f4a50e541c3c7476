"""The page of metrics that trainer and replicas serve: current values, a busy event loop, readers that misbehave."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from millrace.errors import Unavailable
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import endpoint
from millrace.telemetry.metrics.prometheus.endpoint import MetricsEndpoint
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.metrics.prometheus.replica import LEASES_HELD


def served(use: Callable[[MetricsEndpoint, Callable[[], Awaitable[str]]], Awaitable[None]]) -> None:
    """Runs `use` with an endpoint whose metric counts its pages, and with a function that reads a page."""

    async def whole() -> None:
        registry = DeclaredRegistry(Owner.REPLICA)
        describe_process(registry, Owner.REPLICA)
        page = MetricsEndpoint(registry, "127.0.0.1", 0, lambda: LEASES_HELD.on(registry).inc())

        async def read() -> str:
            return await asyncio.to_thread(fetch, page.port)

        try:
            await use(page, read)
        finally:
            page.close()

    asyncio.run(whole())


def fetch(port: int) -> str:
    reply = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    return reply.text


def test_each_page_has_the_values_of_now_and_the_process() -> None:
    async def scenario(page: MetricsEndpoint, read: Callable[[], Awaitable[str]]) -> None:
        assert "\nmillrace_leases_held 1.0\n" in await read()
        text = await read()
        assert "\nmillrace_leases_held 2.0\n" in text
        assert 'millrace_build_info{python="' in text and 'service="replica"} 1.0' in text
        assert "\nprocess_resident_memory_bytes " in text and "\nprocess_start_time_seconds " in text

    served(scenario)


def test_a_busy_event_loop_does_not_keep_the_page_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REFRESH_S", 0.1)

    async def scenario(page: MetricsEndpoint, read: Callable[[], Awaitable[str]]) -> None:
        await read()
        pages: list[str] = []
        reading = threading.Thread(target=lambda: pages.append(fetch(page.port)))
        reading.start()
        reading.join(60)  # the loop runs this line
        assert "\nmillrace_leases_held 1.0\n" in pages[0]

    served(scenario)


def test_silent_connections_make_room_for_a_reader() -> None:
    async def scenario(page: MetricsEndpoint, read: Callable[[], Awaitable[str]]) -> None:
        silent = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(30)]
        try:
            for _ in range(3):
                assert "millrace_leases_held" in await read()
            silent[0].settimeout(60)
            assert await asyncio.to_thread(silent[0].recv, 1) == b""
        finally:
            for one in silent:
                one.close()

    served(scenario)


def test_readers_beyond_the_limit_are_cut_off_and_the_next_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_READERS", 2)
    monkeypatch.setattr(endpoint, "REFRESH_S", 60.0)

    async def scenario(page: MetricsEndpoint, read: Callable[[], Awaitable[str]]) -> None:
        busy = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(2)]
        for one in busy:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        while len(page._server._answered) < 2:  # their pages wait for the event loop, which this line holds
            time.sleep(0.01)  # noqa: ASYNC251
        with socket.create_connection(("127.0.0.1", page.port), timeout=60) as further:
            assert further.recv(1) == b""
        for one in busy:
            one.settimeout(60)
            assert (await asyncio.to_thread(one.recv, 12)).startswith(b"HTTP/1.0 200")
            one.close()
        async with asyncio.timeout(60):
            while page._server._answered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "millrace_leases_held" in await read()

    served(scenario)


def test_a_port_that_is_taken_is_told() -> None:
    async def scenario(page: MetricsEndpoint, read: Callable[[], Awaitable[str]]) -> None:
        with pytest.raises(Unavailable, match=r"metrics at 127\.0\.0\.1:\d+.*--metrics-port"):
            MetricsEndpoint(DeclaredRegistry(Owner.REPLICA), "127.0.0.1", page.port, lambda: None)

    served(scenario)
