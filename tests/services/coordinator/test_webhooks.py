"""Webhooks, called over real HTTP and TLS: what is sent and signed, attempts, jobs that stand still, a coordinator that
takes over."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import app as command
from millrace.errors import InvalidJob
from millrace.ids import JobId
from millrace.rest import JobState
from millrace.spec.schedule import Webhook
from millrace.validation.urls import ALLOWED
from services.coordinator import webhooks
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from services.coordinator.webhooks import Hook, Webhooks
from tests.certificates import Authority
from tests.services.coordinator.conftest import running
from tests.services.coordinator.redis import a_job, lead, with_store

KEY = "a key of the team"


@dataclass
class Received:
    """A receiver of webhooks."""

    url: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any], bytes]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    """Of the next answers; 200 after them."""

    def kinds(self) -> list[str]:
        return [message["kind"] for _, message, _ in self.requests]


@contextlib.contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Received]:
    got = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = got.statuses.pop(0) if got.statuses else 200
            got.requests.append(({k.lower(): v for k, v in self.headers.items()}, json.loads(body), body))
            self.send_response(status)
            if status == 302:
                self.send_header("location", got.url)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    family, _, _, _, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]
    server = type("Server", (ThreadingHTTPServer,), {"address_family": family})(address, Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    got.url = f"{'https' if tls else 'http'}://localhost:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    monkeypatch.setenv(ALLOWED, "localhost")
    monkeypatch.setenv("TEAM_KEY", KEY)
    for name, value in {"LOOK_S": 0.02, "STALL_LOOK_S": 0.02, "FIRST_RETRY_S": 0.01, "LONGEST_RETRY_S": 0.02}.items():
        monkeypatch.setattr(webhooks, name, value)
    with receiver() as received:
        yield received


def job_with(*hooks: dict[str, Any], number: int = 1, **fields: Any) -> JobRecord:
    return replace(a_job(number), spec_json=json.dumps({"output": "/out", "webhooks": list(hooks)}), **fields)


async def until(true: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not (found if isinstance(found := true(), bool) else await found):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def sending(store: Store, own: Hook | None = None) -> Any:
    """Sends meanwhile. The value counts the messages by outcome."""
    prometheus = PrometheusMetrics()
    components: Any = SimpleNamespace(store=store, events=Events(store), prometheus=prometheus)
    views: Any = SimpleNamespace(waits_for=lambda job: SimpleNamespace(message="no trainer is connected"))
    task = asyncio.create_task(Webhooks(components, views, own).run())
    try:
        yield lambda outcome: prometheus.registry.get_sample_value("millrace_webhooks_total", {"outcome": outcome})
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def end(store: Store, job: JobRecord, state: JobState, **fields: Any) -> None:
    await store.jobs.move(job.id, state, "over", only=[JobState.QUEUED], finished_s=time.time(), **fields)


def scenario(url: str, play: Callable[[Store], Awaitable[None]]) -> None:
    async def run(store: Store) -> None:
        await lead(store)
        async with asyncio.timeout(120):
            await play(store)

    with_store(url, run)


def reported(store: Store) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await store.index.reported_until() is not None

    return look


def test_an_end_is_told_once_signed_after_refused_attempts(got: Received, redis_url: str) -> None:
    got.statuses = [500, 429]
    job = job_with({"url": got.url, "secret": "env:TEAM_KEY"}, user="alice")

    async def play(store: Store) -> None:
        async with sending(store) as messages:
            await until(reported(store))
            await store.jobs.create(job)
            await end(store, job, JobState.FAILED, failure="no trainer joined", step=3)
            await until(lambda: len(got.requests) == 3)
            (last,) = await store.index.ended_after(0.0, 10)

            async def noted() -> bool:
                return await store.index.reported_until() == last[1]

            await until(noted)
            assert (messages("delivered"), messages("failed")) == (1, 0)
        async with sending(store):  # another coordinator
            await store.jobs.create(other := job_with({"url": got.url}, number=2))
            await end(store, other, JobState.CANCELLED)
            await until(lambda: len(got.requests) == 4)

    scenario(redis_url, play)
    assert got.kinds() == ["failed"] * 3 + ["cancelled"] and len({m["id"] for _, m, _ in got.requests}) == 2
    headers, message, body = got.requests[2]
    assert message["job"]["failure"] == "no trainer joined" and message["job"]["user"] == "alice"
    assert message["text"] == f"sums ({job.id}) failed after step 3: no trainer joined"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    right = base64.b64encode(hmac.new(KEY.encode(), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{right}" and headers["webhook-id"] == message["id"]
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 300
    assert "webhook-signature" not in got.requests[3][0]


def test_a_standard_key_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_KEY", f"whsec_{base64.b64encode(b'twenty-four random bytes').decode()}")
    hook = Hook(Webhook(url="https://hooks.example.com", secret="env:TEAM_KEY"), "webhooks.0")
    assert hook.key() == b"twenty-four random bytes"


@pytest.mark.parametrize(
    ("statuses", "attempts"), [([404], 1), ([302], 1), ([503] * webhooks.ATTEMPTS, webhooks.ATTEMPTS)]
)
def test_what_is_not_delivered_is_an_event(statuses: list[int], attempts: int, got: Received, redis_url: str) -> None:
    got.statuses = list(statuses)
    job = job_with({"url": got.url, "when": ["failed"]})

    async def play(store: Store) -> None:
        async def failed() -> bool:
            found = await store.records(job.id).events("")
            return any(event.kind == "webhook.failed" for event in found)

        async with sending(store) as messages:
            await until(reported(store))
            await store.jobs.create(job)
            await end(store, job, JobState.FAILED)
            await until(failed)
            assert (messages("delivered"), messages("failed")) == (0, 1)
        (event,) = [e for e in await store.records(job.id).events("") if e.kind == "webhook.failed"]
        assert event.data.webhook == "webhooks.0" and f"status {statuses[0]}" in event.message

    scenario(redis_url, play)
    assert len(got.requests) == attempts


def test_a_delivery_that_a_coordinator_left_is_repeated_by_the_next(
    got: Received, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got.statuses = [500]
    job = job_with({"url": got.url})

    async def play(store: Store) -> None:
        monkeypatch.setattr(webhooks, "FIRST_RETRY_S", 100.0)
        monkeypatch.setattr(webhooks, "LONGEST_RETRY_S", 100.0)
        async with sending(store):
            await until(reported(store))
            await store.jobs.create(job)
            await end(store, job, JobState.FAILED)
            await until(lambda: len(got.requests) == 1)
        async with sending(store):
            await until(lambda: len(got.requests) == 2)

    scenario(redis_url, play)
    assert got.kinds() == ["failed"] * 2 and got.requests[0][1]["id"] == got.requests[1][1]["id"]


def test_a_job_that_stands_still_is_told_once_a_step(got: Received, redis_url: str) -> None:
    own = Hook(Webhook(url=got.url, stalled_s=0.1))
    job = job_with({"url": got.url, "when": ["stalled"], "stalled_s": 0.1})

    async def play(store: Store) -> None:
        await store.jobs.create(job)
        await store.jobs.update(job.id, step=4)
        for state in (JobState.STARTING, JobState.RUNNING):
            await store.jobs.move(job.id, state, "on")
        async with sending(store, own):
            await until(lambda: len(got.requests) == 2)
        async with sending(store, own):  # another coordinator tells nothing again
            await store.jobs.update(job.id, step=5)
            await until(lambda: len(got.requests) == 4)
            await store.jobs.move(job.id, JobState.PAUSED, "paused")

    scenario(redis_url, play)
    assert got.kinds() == ["stalled"] * 4
    told = [message["text"] for _, message, _ in got.requests]
    assert all(f"after step {4 + n // 2}; it waits: no trainer is connected" in text for n, text in enumerate(told))


def test_a_job_cannot_reach_inside(got: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "")
    hook = Hook(Webhook(url=got.url.replace("http:", "https:")), "webhooks.0")
    message = webhooks._message(None, "test", "test.1", "A test.")
    with pytest.raises(InvalidJob, match="internal address"):
        asyncio.run(webhooks._send(hook, message))
    assert not got.requests
    asyncio.run(webhooks._send(replace(hook, settings=Webhook(url=got.url), field=webhooks.OWN), message))
    assert got.kinds() == ["test"]


def test_tls_is_checked_for_the_name_of_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "127.0.0.0/8,::1")
    authority = Authority(tmp_path)
    message = webhooks._message(None, "test", "test.1", "A test.")
    for name, delivered in (("localhost", True), ("other.example", False)):
        files = authority.member(name, names=[name])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
        # The resolver names an address; the certificate is that of the name.
        with receiver(context) as got:
            url = got.url
            monkeypatch.setattr(webhooks, "check_of_job", lambda *_, url=url: webhooks.parsed(url, "url", url))
            if delivered:
                asyncio.run(webhooks._send(Hook(Webhook(url=url), "webhooks.0"), message))
            else:
                with pytest.raises(webhooks.NotDelivered):
                    asyncio.run(webhooks._send(Hook(Webhook(url=url), "webhooks.0"), message))
        assert len(got.requests) == delivered
        assert not delivered or got.requests[0][0]["host"] == url.split("/")[2]


@pytest.mark.slow
def test_of_a_coordinator_and_its_command(got: Received, tmp_path: Path, spec: dict[str, Any]) -> None:
    spec["webhooks"] = [{"url": got.url, "secret": "env:TEAM_KEY", "when": ["cancelled"]}]
    asked = ("--webhook", got.url, "--webhook-secret", "env:TEAM_KEY")
    with running(tmp_path / "coordinator", *asked) as process:
        job = process.client.submit(spec)

        def ran(*arguments: str) -> Any:
            return CliRunner().invoke(command, ["webhook", "test", *arguments, "--url", process.client.url])

        assert ran().output.split() == ["--webhook:", "delivered"]
        got.statuses = [403]
        answer = ran(str(JobId(job.id)))
        assert (
            answer.exit_code == 1
            and "webhooks.0: not delivered: the receiver refused it with status 403" in " ".join(answer.output.split())
        )
        assert got.kinds() == ["test", "test"] and got.requests[1][1]["job"]["id"] == job.id
        process.client.cancel(job.id)
        asyncio.run(until(lambda: len(got.requests) == 4))
        assert got.kinds()[2:] == ["cancelled"] * 2
        assert {message["id"].split(".")[-1] for _, message, _ in got.requests[2:]} >= {"--webhook"}
        spec["webhooks"][0]["url"] = "https://169.254.169.254/latest"
        with pytest.raises(InvalidJob, match=r"webhooks\.0\.url.*leads to an internal address"):
            process.client.submit(spec)
