"""A replica whose episodes agents play over HTTP."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest

from millrace.contracts.v1 import common_pb2
from services.coordinator.state.group import Wanted, fault
from services.rollout.sessions.server import SessionServer
from tests.models import CALL, save_tiny_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.engine_sequences import DTYPE, EngineSequences, skip_without
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.stack import replica_stack


async def nothing() -> None:
    """The work of an agent that has none."""


async def agent(url: str, turns: int, work: Callable[[], Awaitable[object]] = nothing) -> None:
    """Claims an episode and plays it, as a program elsewhere would, with some `work` after each turn."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        async with asyncio.timeout(60):
            while (reply := await http.post("/sessions")).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        claimed = reply.json()
        headers, base = {"authorization": f"Bearer {claimed['key']}"}, f"/sessions/{claimed['id']}"
        messages = list(claimed["row"]["prompt"])
        for number in range(turns):
            body = {"messages": messages, "max_tokens": 6}
            reply = await http.post(f"{base}/v1/chat/completions", json=body, headers=headers)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"and {number}?"}]
            await work()
            await http.post(f"{base}/reward", json={"reward": 0.25, "turn": number}, headers=headers)
        await http.post(f"{base}/end", json={"reward": 1.0}, headers=headers)


EXAMPLES = Path(__file__).parents[4] / "examples/agents"


async def trained_group(
    model: Path, agents: dict[str, Any], samples: int, *players: Any, engine: str = "transformers"
) -> common_pb2.Group:
    """A group of a replica. `players`: agents elsewhere, called with the sessions' URL."""
    rollout = {"max_response_tokens": 150, "dtype": DTYPE, **agents}
    async with replica_stack(engine) as stack:
        server = SessionServer(stack.replica.sessions, "127.0.0.1", 0)
        server.start()
        try:
            await stack.serve(job_spec(model, engine, rollout=rollout), version=3)
            prompt_id = stack.coordinator.issue(7, ground_truth="37", samples=samples, max_response_tokens=150)
            await asyncio.gather(*(player(server.url) for player in players))
            await until(lambda: stack.coordinator.answered == 1, 120.0)
            assert not stack.coordinator.dropped, stack.coordinator.dropped
            return stack.coordinator.groups[prompt_id]
        finally:
            await server.stop()


@pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        pytest.param("vllm", marks=[pytest.mark.e2e, pytest.mark.matrix]),  # the sessions do not know their engine
        pytest.param("sglang", marks=pytest.mark.gpu),
    ],
)
def test_what_is_trained_are_the_tokens_that_the_engine_saw(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(engine)
    model, seen = save_tiny_model(tmp_path, tied=True), EngineSequences(monkeypatch)
    players = [partial(agent, turns=3)] * 2
    group = asyncio.run(trained_group(model, {"agent": "external"}, 2, *players, engine=engine))
    assert fault(group, Wanted(2, temperature=1.0, most_tokens=350)) is None
    seen.check(group, version=3)
    assert len(seen.all) == 6
    assert [turn.reward for one in group.trajectories for turn in one.turns] == [0.25] * 6
    assert [one.reward for one in group.trajectories if one.HasField("reward")] == [1.0] * 2


@pytest.mark.matrix  # test_sessions.py counts the slots
def test_agents_that_are_at_work_leave_the_engine_to_others(tmp_path: Path) -> None:
    """The engine has 1 slot. No agent goes on before each of 4 has had a turn, which takes 4 leases at once."""
    model, all_spoke = save_tiny_model(tmp_path, tied=True), asyncio.Barrier(4)
    rollout = {"agent": "external", "samples_per_prompt": 1, "engine_options": {"max_num_seqs": 1}}

    async def scenario() -> None:
        async with replica_stack() as stack:
            server = SessionServer(stack.replica.sessions, "127.0.0.1", 0)
            server.start()
            try:
                await stack.serve(job_spec(model, rollout=rollout))
                for row in range(4):
                    stack.coordinator.issue(row, samples=1, max_response_tokens=150)
                async with asyncio.timeout(120):
                    await asyncio.gather(*(agent(server.url, 2, all_spoke.wait) for _ in range(4)))
                await until(lambda: stack.coordinator.answered == 4, 60.0)
                assert not stack.coordinator.dropped
            finally:
                await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["guess.sh"], marks=pytest.mark.skipif(not which("jq"), reason="the example needs jq")),
        [sys.executable, "guess_openai.py"],
        pytest.param([sys.executable, "guess_anthropic.py"], marks=pytest.mark.matrix),  # test_clients.py
    ],
    ids=lambda command: command[-1],
)
def test_the_examples_are_trained(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = save_tiny_model(tmp_path, tied=True, never_sampled=CALL), EngineSequences(monkeypatch)
    asked = {"command": [*command[:-1], str(EXAMPLES / command[-1])], "renderer_options": {"tool_parser": "qwen3"}}
    group = asyncio.run(trained_group(model, {"agent": asked}, 2))
    assert fault(group, Wanted(2, temperature=1.0, most_tokens=350)) is None
    seen.check(group, version=3)
    assert len(seen.all) >= 2 and all(one.HasField("reward") for one in group.trajectories[-1:])
    told = [json.loads(one.metadata)["agent"] for one in group.trajectories if one.metadata]
    assert all(each["status"] == 0 for each in told), told
