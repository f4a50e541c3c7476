"""OpenEnv servers as environments. Without the package openenv-core a server of the tests speaks its protocol;
`make test-environments` runs the example with the package too."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.environments.registry import check
from millrace.errors import InvalidJob, Unavailable
from services.rollout.environments.environment import Called, EnvironmentFailed
from tests.ports import held_port
from tests.services.rollout.coordinator import until
from tests.services.rollout.environments.openenv_server import Echo, Number, Tools, serving
from tests.services.rollout.environments.playing import account_of, call, environments, play
from tests.services.rollout.environments.test_mcp import served, started

PYTHON = os.environ.get("MILLRACE_OPENENV_PYTHON", "")
"""An interpreter that has openenv-core."""
EXAMPLE = Path(__file__).parents[4] / "examples/environments/number_server.py"
ROW = {"index": 0, "data_source": "d", "prompt": "hi", "ground_truth": None, "extra_info": {}}


def game(url: str, **options: Any) -> dict[str, Any]:
    return {"name": "openenv", "options": {"url": url, **options}}


@asynccontextmanager
async def number_server(real: bool) -> AsyncIterator[str]:
    if real:
        async with served([PYTHON, str(EXAMPLE)]) as port:
            yield f"http://127.0.0.1:{port}"
    else:
        async with serving(Number) as (url, _):
            yield url


def bisect(text: str) -> str:
    """Guesses as one would, after a guess that is no number."""
    answers = [part.split("<|im_end|>")[0].strip() for part in text.split("<|im_start|>tool\n")[1:]]
    if not answers:
        return call("act", guess="one")
    low, high = 1, 100
    for answer in answers[1:]:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
    return call("act", guess=(low + high) // 2)


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.skipif(not PYTHON, reason="needs openenv-core"))]
)
def test_the_example_is_played_by_the_tool_of_its_action(real: bool) -> None:
    async def scenario() -> None:
        options = {"observation_field": "text", "reset": {"number": 37}}
        async with number_server(real) as url, environments(**game(url, **options)) as episodes:
            (tool,) = episodes.environments.tools
            assert tool["function"]["name"] == "act" and tool["function"]["description"] == "Guesses the number."
            assert tool["function"]["parameters"]["properties"]["guess"]["type"] == "integer"
            assert set(tool["function"]["parameters"]["properties"]) == {"guess"}
            episode = await play(episodes, bisect, "")
        (trajectory,) = episode.trajectories
        assert "Input should be a valid integer" in trajectory.turns[1].given_text
        rewards = [turn.reward for turn in trajectory.turns]
        assert rewards == [0.0, *[-0.05] * (len(rewards) - 2), 1.0] and len(rewards) == 4
        assert episode.scored is not None and episode.scored.score == 0.0
        account = account_of(episode)
        assert (account.tool_calls, account.tool_failures) == (4, 1)

    asyncio.run(scenario())


def test_a_turn_is_the_text_of_an_action() -> None:
    async def scenario() -> None:
        async with serving(Echo) as (url, server):
            options = {"action_field": "message", "action": {"times": 2}, "reset": {"seed": 1, "level": 2}}
            async with started(**game(url, **options)) as opened:
                assert opened.tools == ()
                async with opened.session() as session:
                    (message,) = await session.reset({**ROW, "extra_info": {"reset": {"level": 3}}})
                    assert message["role"] == "user" and message["content"].startswith("hi\n\n{")
                    assert '\\"level\\": 3' in message["content"] and '\\"seed\\": 1' in message["content"]
                    told = await session.step({"role": "assistant", "content": "ab"})
                    assert told == ([{"role": "user", "content": '{"said": "abab", "length": 1}'}], None, False)
                    with pytest.raises(EnvironmentFailed, match="step: no such word"):
                        await session.step({"content": "fail"})
                    assert (await session.call("act", {})).failed
                    assert (await session.step({"content": "end"}))[2]
                    assert await session.score() == (None, {})
                async with opened.session() as session:
                    with pytest.raises(EnvironmentFailed, match="over already"):
                        await session.reset({**ROW, "extra_info": {"reset": {"over": True}}})
            await until(lambda: not server.sessions, 60.0)
            with pytest.raises(InvalidJob, match=r"options.action_field: \"word\": .* name one of message, times"):
                async with started(**game(url, action_field="word")):
                    pass

    asyncio.run(scenario())


def test_a_server_with_tools_of_its_own_offers_them() -> None:
    async def scenario() -> None:
        async with serving(Tools) as (url, _), started(**game(url)) as opened, opened.session() as session:
            (tool,) = opened.tools
            assert tool["function"]["name"] == "add" and "a" in tool["function"]["parameters"]["properties"]
            await session.reset(ROW)
            assert await session.call("add", {"a": 1}) == Called("2", reward=0.5)
            assert await session.call("add", {}) == Called("Error: a is missing", failed=True)
            assert await session.step({"content": "2"}) == ([], None, True), "it acts no more"

    asyncio.run(scenario())


def test_an_episode_waits_for_room_at_the_server() -> None:
    async def scenario() -> None:
        async with (
            serving(Echo, most=1) as (url, server),
            started(**game(url, action_field="message")) as opened,
            opened.session() as first,
            opened.session() as second,
        ):
            await first.reset(ROW)
            waiting = asyncio.create_task(second.reset(ROW))
            await until(lambda: server.refused > 0, 60.0)
            assert not waiting.done()
            await first.close()
            async with asyncio.timeout(60.0):
                assert len(await waiting) == 1

    asyncio.run(scenario())


def test_a_server_that_ends_fails_its_episodes_and_serves_the_next() -> None:
    async def scenario() -> None:
        async with serving(Echo) as (url, _), started(**game(url, action_field="message")) as opened:
            async with opened.session() as session:
                await session.reset(ROW)
                session._socket.transport.abort()
                with pytest.raises(EnvironmentFailed, match="step: the connection to the server is lost"):
                    await session.step({"content": "x"})
            async with opened.session() as session:
                assert len(await session.reset(ROW)) == 1
        with held_port() as port, pytest.raises(Unavailable, match=r"options.url: http://127.0.0.1:\d+: "):
            async with started(**game(f"http://127.0.0.1:{port}")):
                pass

    asyncio.run(scenario())


def test_its_options_are_checked_at_submission() -> None:
    check("openenv", {"url": "http://games:8000"})
    with pytest.raises(InvalidJob, match=r"rollout.environment.options.url: is missing"):
        check("openenv", {})
    with pytest.raises(InvalidJob, match=r"rollout.environment.options.action_fild"):
        check("openenv", {"url": "http://games:8000", "action_fild": "x"})
