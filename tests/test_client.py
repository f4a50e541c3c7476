"""The client against a server that misbehaves as told. Against a real coordinator: tests/test_cli.py and tests/e2e."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from millrace.client import Client
from millrace.errors import InvalidJob, InvalidState, MillraceError, NotFound, Unavailable
from millrace.rest import JobState
from millrace.spec import parse

JOB = {
    "id": "job-0123456789ab",
    "name": "demo",
    "state": "running",
    "step": 3,
    "steps": 60,
    "version": 3,
    "reward": 0.5,
    "evaluation_before": 0.1,
    "evaluation_last": None,
    "created_s": 1.0,
    "checkpoint": None,
    "report": None,
    "spec": {},
}
PATH = f"/v1/jobs/{JOB['id']}"


def event(number: int, message: str = "") -> str:
    data = {"step": number, "reward": 0.5, "seconds": 1.0}
    told = {
        "id": f"{number}-0",
        "time_s": 1.0,
        "kind": "step.done",
        "message": message or f"step {number}",
        "data": data,
    }
    return f": still here\n\nid: {number}-0\nevent: step.done\ndata: {json.dumps(told, ensure_ascii=False)}\n\n"


class Coordinator(ThreadingHTTPServer):
    """Answers what `answers` says, in turn, the last one for ever; `asked` keeps what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers: dict[str, list[Any]] = {"/healthz": [(200, {})], PATH: [(200, JOB)]}
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self, path: str) -> list[dict[str, str]]:
        """Headers of the requests for `path`."""
        return [headers for _, asked, headers, _ in self.asked if asked == path]


class Answering(BaseHTTPRequestHandler):
    server: Coordinator

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}, body))
        answers = self.server.answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "hang up":
            self.close_connection = True
            return
        if isinstance(answer, str):
            self._stream(answer)
            return
        status, tree = answer
        is_page = isinstance(tree, bytes)
        data = tree if is_page else json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("content-type", "text/html" if is_page else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def _stream(self, text: str) -> None:
        """Server-sent events; with `broken` at its end the connection breaks in the middle of a chunk."""
        self.protocol_version = "HTTP/1.1"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        data = text.removesuffix("broken").encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if text.endswith("broken"):
            self.wfile.write(b"ff\r\nhalf a chu")
        else:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def problem(status: int, kind: str) -> tuple[int, dict[str, Any]]:
    told = {"type": kind, "title": kind, "status": status, "detail": f"what went wrong ({kind}).", "fix": "do this."}
    return status, told


@pytest.mark.parametrize(
    ("status", "kind"), [(422, InvalidJob), (404, NotFound), (409, InvalidState), (503, Unavailable)]
)
def test_a_problem_becomes_the_error_that_it_was(
    coordinator: Coordinator, status: int, kind: type[MillraceError]
) -> None:
    coordinator.answers[PATH] = [problem(status, kind.__name__)]
    with Client(coordinator.url, patience_s=0.3) as client, pytest.raises(kind, match="what went wrong") as raised:
        client.job(JOB["id"])
    assert type(raised.value) is kind and raised.value.fix == "do this."


@pytest.mark.parametrize(("token", "why"), [("", "is not set"), ("wrong", "is not the token of the coordinator")])
def test_a_refused_token_is_told_by_the_variable_that_holds_it(coordinator: Coordinator, token: str, why: str) -> None:
    coordinator.answers[PATH] = [problem(401, "unauthorized")]
    with Client(coordinator.url, token=token) as client, pytest.raises(InvalidState, match=why) as told:
        client.job(JOB["id"])
    assert "MILLRACE_TOKEN_FILE" in told.value.fix and "Authorization" not in str(told.value)


def test_an_answer_that_is_no_problem_document_is_told_as_it_is(coordinator: Coordinator) -> None:
    coordinator.answers[PATH] = [(418, ["a teapot"])]
    with Client(coordinator.url) as client, pytest.raises(MillraceError, match=r"answered 418.*teapot"):
        client.job(JOB["id"])


def test_of_a_page_only_the_status_is_told(coordinator: Coordinator) -> None:
    coordinator.answers[PATH] = [(404, b"<html>Not here</html>")]
    with Client(coordinator.url) as client, pytest.raises(NotFound, match="answered 404: Not Found") as told:
        client.job(JOB["id"])
    assert "<html>" not in told.value.what and "--url" in told.value.fix


def test_submission_carries_key_and_token(coordinator: Coordinator) -> None:
    coordinator.answers["/v1/jobs"] = [(201, JOB)]
    with Client(coordinator.url, token="secret") as client:
        assert client.submit({"name": "demo"}, key="once").state is JobState.RUNNING
        client.submit({"name": "demo"})
        client.submit({"name": "demo"})
    first, second, third = coordinator.paths("/v1/jobs")
    assert first["idempotency-key"] == "once" and first["authorization"] == "Bearer secret"
    assert len({second["idempotency-key"], third["idempotency-key"], "once"}) == 3
    assert json.loads(coordinator.asked[0][3]) == {"name": "demo"}


def test_a_spec_is_sent_without_defaults_which_an_older_coordinator_may_not_know(coordinator: Coordinator) -> None:
    given = {
        "name": "sums",
        "model": {"path": "/model"},
        "data": {"files": ["/train.parquet"]},
        "algorithm": {"preset": "dapo", "policy_loss": {"name": "clip", "options": {"clip_low": 0.1}}},
    }
    spec = parse(given)
    coordinator.answers["/v1/jobs"] = [(201, JOB)]
    with Client(coordinator.url) as client:
        client.submit(spec)
        client.submit(given)
    sent, as_given = (json.loads(body) for *_, body in coordinator.asked if body)
    assert sent.keys() == given.keys() == as_given.keys() and sent["data"] == given["data"]
    assert parse(sent) == spec


def test_a_broken_connection_is_tried_again_with_the_same_key(coordinator: Coordinator) -> None:
    coordinator.answers["/v1/jobs"] = ["hang up", "hang up", (201, JOB)]
    with Client(coordinator.url) as client:
        client.submit({"name": "demo"})
    keys = {headers["idempotency-key"] for headers in coordinator.paths("/v1/jobs")}
    assert len(coordinator.paths("/v1/jobs")) == 3 and len(keys) == 1


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_coordinator_whose_redis_is_away_is_asked_again(coordinator: Coordinator, status: int) -> None:
    away = problem(status, "Unavailable")
    coordinator.answers[PATH] = [away, away, (200, {**JOB, "state": "succeeded"})]
    coordinator.answers[f"{PATH}/events"] = [away, event(1), ""]
    with Client(coordinator.url) as client:
        assert client.wait(JOB["id"], 60.0).state is JobState.SUCCEEDED
        assert [e.id for e in client.events(JOB["id"])] == ["1-0"]


@pytest.mark.parametrize(
    "url", ["http://[bad", "http://a:b:c", "127.0.0.1:7700", "http://host:99999999", "http:///jobs"]
)
def test_an_address_that_is_none_is_told(url: str) -> None:
    with Client(url, token="") as client, pytest.raises(MillraceError) as told:
        client.jobs()
    assert url in told.value.what and "--url" in told.value.fix


@pytest.mark.parametrize("answer", [(200, {"hello": 1}), (200, 5), (200, ["x"]), "<html>a page</html>"])
def test_what_is_no_coordinator_is_told(coordinator: Coordinator, answer: Any) -> None:
    coordinator.answers |= {PATH: [answer], "/v1/jobs": [answer], f"{PATH}/events": [answer]}
    with Client(coordinator.url) as client:
        for ask in (client.jobs, lambda: client.job(JOB["id"]), lambda: list(client.events(JOB["id"]))):
            with pytest.raises(MillraceError, match=coordinator.url) as told:
                ask()
            assert "--url" in told.value.fix


def test_a_token_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "token"))
    wrong = "MILLRACE_TOKEN: holds a space or a character that is not ASCII"
    missing = f'MILLRACE_TOKEN_FILE: "{tmp_path}/token": No such file or directory'
    for content, why in ((None, missing), ("gehéim".encode("latin-1"), wrong), ("gehéim".encode(), wrong)):
        if content is not None:
            (tmp_path / "token").write_bytes(content)
        with Client() as client, pytest.raises(MillraceError) as told:
            client.jobs()
        assert told.value.what == f"{why}."


def test_patience_ends_with_an_error_that_names_the_coordinator() -> None:
    with (
        Client("http://127.0.0.1:9", patience_s=0.3) as client,
        pytest.raises(Unavailable, match=r"127.0.0.1:9") as told,
    ):
        client.jobs()
    assert "millrace up" in told.value.fix


def test_the_time_is_told_for_which_nothing_answered() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5, patience_s=0.1) as client,
        pytest.raises(Unavailable) as told,
    ):
        client.jobs()
    waited = re.search(r"within ([0-9.]+) s", told.value.what)
    assert waited is not None and float(waited[1]) >= 0.5


def test_events_go_on_where_the_stream_broke_and_end_with_the_job(coordinator: Coordinator) -> None:
    ended = {**JOB, "state": "succeeded"}
    coordinator.answers[PATH] = [(200, JOB), (200, ended)]
    coordinator.answers[f"{PATH}/events"] = [event(1) + event(2) + "broken", event(3), ""]
    with Client(coordinator.url) as client:
        assert [e.message for e in client.events(JOB["id"])] == ["step 1", "step 2", "step 3"]
    asked = [headers.get("last-event-id") for headers in coordinator.paths(f"{PATH}/events")]
    assert asked[:2] == [None, "2-0"] and asked[-1] == "3-0"


def test_events_without_follow_end_with_the_stream(coordinator: Coordinator) -> None:
    coordinator.answers[f"{PATH}/events"] = [event(7)]
    with Client(coordinator.url) as client:
        assert [e.id for e in client.events(JOB["id"], after="6-0", follow=False)] == ["7-0"]
    (headers,) = coordinator.paths(f"{PATH}/events")
    assert headers["last-event-id"] == "6-0"


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_only_a_line_feed_ends_a_line_of_events(coordinator: Coordinator, end: str) -> None:
    coordinator.answers[f"{PATH}/events"] = [event(1, f"one{end}line") + event(2).replace("\n", "\r\n")]
    with Client(coordinator.url) as client:
        assert [e.message for e in client.events(JOB["id"], follow=False)] == [f"one{end}line", "step 2"]


def test_an_event_that_cannot_be_read_is_told(coordinator: Coordinator) -> None:
    coordinator.answers[f"{PATH}/events"] = ["data: {}\n\n"]
    with Client(coordinator.url) as client, pytest.raises(MillraceError, match="did not answer as a coordinator"):
        next(client.events(JOB["id"]))


def test_events_of_an_unknown_job_are_refused(coordinator: Coordinator) -> None:
    coordinator.answers[f"{PATH}/events"] = [problem(404, "NotFound")]
    with Client(coordinator.url) as client, pytest.raises(NotFound):
        next(client.events(JOB["id"]))


def test_waiting_is_bounded(coordinator: Coordinator) -> None:
    with Client(coordinator.url) as client, pytest.raises(Unavailable, match="still running at step 3 of 60"):
        client.wait(JOB["id"], timeout_s=0.1)


def test_ready_says_so_and_never_raises(coordinator: Coordinator) -> None:
    coordinator.answers["/readyz"] = [(503, {}), (200, {})]
    with Client(coordinator.url) as client:
        assert [client.ready(), client.ready()] == [False, True]
    with Client("http://127.0.0.1:9") as client:
        assert client.ready() is False


HEAVY = {"torch", "vllm", "transformers", "numpy", "grpc", "httpx"}


def test_the_import_pulls_in_little_and_nothing_heavy() -> None:
    """Every program that talks to a coordinator waits for the import."""
    code = "import sys, millrace.client; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert not HEAVY & modules and len(modules) < 300
