"""An environment of verifiers as it is installed, in a host of its own, with a replica of the Transformers engine.

`make test-environments` runs it. It needs an interpreter with verifiers and openenv, and the first time packages that
verifiers' harness installs for itself."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.contracts.v1 import common_pb2
from millrace.drops import DropReason
from millrace.spec import JobSpec
from services.rollout.engine import Completion, Sampling
from services.rollout.engines.versioned import VersionedEngine
from services.rollout.sessions.server import SessionServer
from tests.models import save_tiny_model
from tests.ports import held_port
from tests.services.rollout.coordinator import until
from tests.services.rollout.engine_sequences import EngineSequences
from tests.services.rollout.environments.test_mcp import served
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.stack import replica_stack

PYTHON = os.environ.get("MILLRACE_VERIFIERS_PYTHON", "")
"""An interpreter that has verifiers and openenv."""
ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples/environments/verifiers"
PATIENCE_S = 240.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"}

pytestmark = [pytest.mark.skipif(not PYTHON, reason="needs verifiers"), pytest.mark.timeout(600)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model with positions for the environment's long messages."""
    folder = save_tiny_model(tmp_path / "model", tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def config_at(port: int, folder: Path) -> Path:
    """The example's configuration, for a game at `port`."""
    path = folder / "env.json"
    path.write_text((EXAMPLE / "env.json").read_text().replace("8000", str(port)))
    return path


async def rows_of(config: Path) -> list[dict[str, Any]]:
    command = [PYTHON, "-m", "services.environments", "tasks", str(config)]
    told = await asyncio.to_thread(subprocess.run, command, env=ENVIRONMENT, capture_output=True, check=True)
    return [json.loads(line) for line in told.stdout.splitlines()]


class Host:
    """A host that can be killed and started again."""

    def __init__(self, config: Path, port: int) -> None:
        self.config, self.port = config, port
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [PYTHON, "-m", "services.environments", "serve", str(self.config), "--port", str(self.port)]
        self.process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, start_new_session=True)

    async def running(self) -> int:
        """Episodes that run; -1 where it does not answer."""
        try:
            async with httpx.AsyncClient() as http:
                told = await http.get(f"http://127.0.0.1:{self.port}/health")
        except httpx.HTTPError:
            return -1
        return int(told.json()["running"])

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


@asynccontextmanager
async def hosted(tmp_path: Path) -> AsyncIterator[tuple[Host, list[dict[str, Any]]]]:
    """The host with its game, and the rows of its tasks."""
    async with served([PYTHON, str(EXAMPLE / "letters_server.py")]) as game:
        config = config_at(game, tmp_path)
        with held_port() as port:
            host = Host(config, port)
            await host.start()
            try:
                yield host, await rows_of(config)
            finally:
                await host.kill()


def spec_of(model: Path, host: Host) -> JobSpec:
    environment = {"name": "verifiers", "options": {"url": f"http://127.0.0.1:{host.port}"}, "max_turn_tokens": 8}
    return job_spec(
        model,
        rollout={"environment": environment, "max_response_tokens": 3000},
        data={"max_prompt_tokens": 3000},
        trainer={"token_budget": 16384},
    )


@asynccontextmanager
async def serving(model: Path, host: Host) -> AsyncIterator[Any]:
    """A replica that is configured for the host, with its token endpoint."""
    async with replica_stack() as stack:
        server = SessionServer(stack.replica.sessions, "127.0.0.1", 0)
        server.start()
        try:
            await stack.serve(spec_of(model, host), version=3)
            yield stack
        finally:
            await server.stop()


def issue(stack: Any, row: dict[str, Any]) -> str:
    prompt_id = stack.coordinator.issue(7, row["prompt"], samples=2, max_response_tokens=3000)
    stack.coordinator.waiting[-1].extra_info = json.dumps(row["extra_info"])
    return str(prompt_id)


def test_an_unchanged_environment_is_played_and_its_tokens_are_trained(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = EngineSequences(monkeypatch)

    async def scenario() -> common_pb2.Group:
        async with hosted(tmp_path) as (host, rows), serving(model, host) as stack:
            assert rows[0]["data_source"] == "openenv" and rows[0]["extra_info"]["task"]["reset"] == {"seed": 0}
            prompt_id = issue(stack, rows[0])
            await until(lambda: stack.coordinator.answered == 1, PATIENCE_S)
            assert not stack.coordinator.dropped, stack.coordinator.dropped
            group: common_pb2.Group = stack.coordinator.groups[prompt_id]
            return group

    group = asyncio.run(scenario())
    seen.check(group, version=3)
    assert {span.version for one in group.trajectories for span in one.versions} == {3}
    assert 2 <= len(seen.all) <= 4, "an empty turn ends an episode"
    rewards = [one.reward for one in group.trajectories if one.HasField("reward")]
    assert len(rewards) == 2 and all(0.0 <= reward <= 1.0 for reward in rewards)
    details = [json.loads(one.reward_details) for one in group.trajectories if one.reward_details]
    assert [each["openenv_reward"] for each in details] == pytest.approx(rewards)


def test_a_host_that_is_killed_costs_its_episodes_and_goes_on_when_it_is_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()
    generate = VersionedEngine.generate

    async def held(self: Any, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return await generate(self, prompt_tokens, sampling)

    monkeypatch.setattr(VersionedEngine, "generate", held)

    async def scenario() -> common_pb2.Group:
        async with hosted(tmp_path) as (host, rows), serving(model, host) as stack:
            prompt_id = issue(stack, rows[0])
            async with asyncio.timeout(PATIENCE_S):
                await reached.wait()
            await host.kill()
            await host.start()
            await until(lambda: stack.coordinator.answered == 1, PATIENCE_S)
            assert not stack.coordinator.dropped, stack.coordinator.dropped
            group: common_pb2.Group = stack.coordinator.groups[prompt_id]
            return group

    group = asyncio.run(scenario())
    accounts = [one.account for one in group.trajectories if one.HasField("account")]
    assert [account.reruns for account in accounts] == [1, 1], "both episodes were at the host"


def test_a_task_that_the_environment_does_not_have_drops_its_group_with_the_reason(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path) as (host, rows), serving(model, host) as stack:
            row = {**rows[0], "extra_info": {"task": {"reset": "no mapping"}}}
            prompt_id = issue(stack, row)
            await until(lambda: stack.coordinator.answered == 1, PATIENCE_S)
            drop = stack.coordinator.dropped[prompt_id]
            assert drop.reason is DropReason.ENVIRONMENT_FAILED and "ValidationError" in drop.detail

    asyncio.run(scenario())
