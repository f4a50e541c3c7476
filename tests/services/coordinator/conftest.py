"""A coordinator as its own process, and jobs for it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from millrace.client import Client
from millrace.data.row import PromptRow, write_rows
from millrace.wire.tls import scheme, verifying
from services.coordinator.redis_server import RedisServer
from tests.forked import Forked
from tests.ports import held_port


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A redis-server of the tests' own."""
    with asyncio.Runner() as runner:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        runner.run(server.start())
        yield server.url
        runner.run(server.stop())


@pytest.fixture
def empty_redis_url(redis_url: str) -> str:
    """The same server, without what other tests left in it."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


class CoordinatorProcess:
    """A coordinator that is forked, or, `by_command`, started as people start it."""

    def __init__(
        self, folder: Path, *options: str, environment: dict[str, str] | None = None, by_command: bool = False
    ) -> None:
        self._options = options
        self._environment = environment or {}
        self._by_command = by_command
        self._held = contextlib.ExitStack()
        self.process: Forked | subprocess.Popen[bytes] | None = None
        self._settle(folder)

    def _settle(self, folder: Path) -> None:
        self.folder = folder
        self.http_port, self.grpc_port = (self._held.enter_context(held_port()) for _ in range(2))
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.client = Client(f"{scheme()}://127.0.0.1:{self.http_port}", token="", patience_s=10.0)

    def start(self, path: str = "/readyz") -> None:
        """Starts it, and waits until `path` is answered: /readyz by one that leads, /healthz also by one that does
        not."""
        arguments = ["--state-dir", str(self.folder)]
        arguments += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        arguments += ["--heartbeat-s", "0.2", "--lost-after-s", "1.0", *self._options]
        environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | self._environment
        if self._by_command:
            command = [sys.executable, "-m", "services.coordinator", *arguments]
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        else:
            self.process = Forked("services.coordinator", arguments, environment, self._log)
        deadline = time.monotonic() + 120
        while not self.says(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.log())
            time.sleep(0.05)

    def says(self, path: str) -> bool:
        """Whether it answers this path with success."""
        try:
            return httpx.get(f"{self.client.url}{path}", verify=verifying(self.client.url), timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    @property
    def _log(self) -> Path:
        return self.folder / "coordinator.log"

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def end(self) -> None:
        """Stops it, and the Redis that a killed one leaves to the next."""
        self.client.close()
        self._held.close()
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(self.folder / "redis"):
                process.kill()

    def begin_anew(self) -> None:
        """In a folder and at addresses of its own: it knows no job, and no channel remembers that it was away."""
        self.end()
        self._settle(self.folder.with_name(f"{self.folder.name}-again"))
        self.folder.mkdir()
        self.start()


@pytest.fixture(scope="module")
def of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with running(tmp_path_factory.mktemp("coordinator")) as process:
        yield process


@pytest.fixture
def shared(of_the_file: CoordinatorProcess, request: pytest.FixtureRequest) -> Iterator[CoordinatorProcess]:
    """One for all tests of a file. After a test that failed it begins anew: a job that hangs, or a coordinator that is
    gone, fails no other test."""
    failed = request.session.testsfailed
    yield of_the_file
    if request.session.testsfailed > failed:
        print(of_the_file.log()[-10_000:])
        of_the_file.begin_anew()


@contextlib.contextmanager
def running(
    folder: Path, *options: str, environment: dict[str, str] | None = None, by_command: bool = False
) -> Iterator[CoordinatorProcess]:
    folder.mkdir(exist_ok=True)
    process = CoordinatorProcess(folder, *options, environment=environment, by_command=by_command)
    try:
        process.start()
        yield process
    finally:
        process.end()


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """A job of 6 steps of 4 groups of 2 samples, from 48 rows, with an evaluation."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors").write_bytes(b"")
    asked = [[{"role": "user", "content": f"{n} + 1"}] for n in range(48)]
    rows = [PromptRow(n, "sums", prompt, ground_truth=str(n + 1)) for n, prompt in enumerate(asked)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "held_out.jsonl", rows[:5])
    return {
        "name": "sums",
        "output": str(tmp_path / "out"),
        "model": {"path": str(model)},
        "data": {"files": [str(tmp_path / "train.jsonl")], "max_prompt_tokens": 64},
        "reward": {"function": "exact"},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 16, "lease_s": 2.0},
        "trainer": {"token_budget": 256},
        "schedule": {"steps": 6, "prompts_per_step": 4, "max_staleness": 1},
        "evaluation": {"files": [str(tmp_path / "held_out.jsonl")], "samples_per_prompt": 1},
    }
