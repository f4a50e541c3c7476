"""Tools of MCP servers: over standard input and output and over HTTP, alone and beside an environment; what fails."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.environments.registry import check
from millrace.errors import InvalidJob, Unavailable
from millrace.spec.environment import Environment
from millrace.validation.mistakes import InvalidValue
from services.rollout.environments.environment import Called, EnvironmentFailed
from services.rollout.work.job import environments_of
from tests.ports import held_port
from tests.services.rollout.environments.playing import account_of, call, environments, play
from tests.services.rollout.jobs import job_spec

EXAMPLES = Path(__file__).parents[4] / "examples/environments"
CAPITALS = [sys.executable, str(EXAMPLES / "capitals.py")]
COUNTER = '''
import os, socket, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
calls = 0

@server.tool()
def count() -> str:
    """Counts its calls."""
    global calls
    calls += 1
    return str(calls)

@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)

@server.tool()
async def hang() -> str:
    """Blocks the whole server."""
    time.sleep(3600)

@server.tool()
def reach(port: int) -> str:
    """Speaks to a port."""
    socket.create_connection(("127.0.0.1", port), 5).close()
    return "reached"

server.run()
'''


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("counter") / "counter.py"
    path.write_text(COUNTER)
    return [sys.executable, str(path)]


def capital_asked(text: str) -> str:
    """Asks for a capital that is not there, then for one that is, then says it."""
    answers = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    if len(answers) < 2:
        return call("capital", country=["Atlantis", "Peru"][len(answers)])
    return answers[-1]


def test_tools_alone_are_called_until_the_policy_answers() -> None:
    async def scenario() -> None:
        async with environments("tools", mcp=[{"command": CAPITALS}]) as episodes:
            (tool,) = episodes.environments.tools
            assert tool["function"]["name"] == "capital"
            assert "Looks up the capital of a country." in tool["function"]["description"]
            assert tool["function"]["parameters"]["properties"]["country"]["type"] == "string"
            episode = await play(episodes, capital_asked, "Lima")
        (trajectory,) = episode.trajectories
        assert "there is no entry for Atlantis" in trajectory.turns[1].given_text
        assert "Lima" in trajectory.turns[2].given_text and len(trajectory.turns) == 3
        assert episode.scored is None, "the reward function scores the answer"
        account = account_of(episode)
        assert (account.tool_calls, account.tool_failures) == (2, 1)

    asyncio.run(scenario())


@asynccontextmanager
async def served(command: list[str]) -> AsyncIterator[int]:
    """The port of a server in a process of its own. It is told the port as its last argument."""
    with held_port() as port:
        process = await asyncio.create_subprocess_exec(*command, str(port))
        try:
            async with asyncio.timeout(90.0):
                while not await _accepts(port):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield port
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


def test_a_class_has_the_tools_of_a_server_over_http_beside_its_own() -> None:
    guess = f"{EXAMPLES}/guess.py:Guess"

    async def scenario() -> None:
        async with served(CAPITALS) as port:
            server = {"url": f"http://127.0.0.1:{port}/mcp"}
            async with environments(guess, mcp=[server]) as episodes:
                assert [each["function"]["name"] for each in episodes.environments.tools] == ["compare", "capital"]
                async with episodes.environments.session() as session:
                    await session.reset({"index": 0, "data_source": "d", "prompt": "", "ground_truth": 7})
                    assert await session.call("compare", {"guess": 9}) == Called("lower")
                    assert await session.call("capital", {"country": "Japan"}) == Called("Tokyo")
                    assert (await session.call("capital", "Japan")).failed
                    assert (await session.call("capital", {"town": "Japan"})).failed

    asyncio.run(scenario())


@asynccontextmanager
async def started(**fields: Any) -> AsyncIterator[Any]:
    spec = job_spec(Path("/nowhere"), rollout={"environment": {"processes": 2, **fields}})
    assert spec.rollout.environment is not None
    opened = environments_of(spec.rollout.environment, spec.reward)
    assert opened is not None
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()


def test_a_shared_server_that_ends_fails_a_call_and_is_started_again(counter: list[str]) -> None:
    async def scenario() -> None:
        async with started(mcp=[{"command": counter}]) as opened, opened.session() as session:
            async with opened.session() as other:
                assert [await each.call("count", {}) for each in (session, other)] == [Called("1"), Called("2")]
            assert opened.most_episodes == 64
            ended = await session.call("end", {})
            assert ended.failed and ended.content.startswith("Error: end is not available: ")
            assert await session.call("count", {}) == Called("1"), "a new process counts from the beginning"

    asyncio.run(scenario())


def test_a_server_of_an_episode_lives_and_dies_with_it(counter: list[str]) -> None:
    async def scenario() -> None:
        servers = [{"command": counter, "scope": "episode"}]
        async with started(mcp=servers) as opened, opened.session() as one, opened.session() as other:
            counted = [await each.call("count", {}) for each in (one, other, one)]
            assert counted == [Called("1"), Called("1"), Called("2")]
            with pytest.raises(EnvironmentFailed, match=r"mcp .*counter.py: "):
                await one.call("end", {})
            assert await other.call("count", {}) == Called("2")
            assert opened.most_episodes == 2, "as many programs as there are processes"

    asyncio.run(scenario())


def test_a_server_that_hangs_is_told_and_replaced(counter: list[str]) -> None:
    async def scenario() -> None:
        async with started(mcp=[{"command": counter}], call_s=1.0) as opened, opened.session() as session:
            for _ in range(3):
                assert await session.call("hang", {}) == Called("Error: hang took longer than 1 s.", failed=True)
            async with asyncio.timeout(120.0):
                while (counted := await session.call("count", {})).failed:
                    assert counted.content == "Error: count took longer than 1 s."

    asyncio.run(scenario())


def test_a_command_runs_in_the_sandbox(counter: list[str]) -> None:
    async def scenario() -> None:
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening, started(mcp=[{"command": counter}]) as opened, opened.session() as session:
            assert (await session.call("reach", {"port": port})).failed, "reward.network is false"

    asyncio.run(scenario())


def test_what_cannot_be_used_is_told_with_its_field(counter: list[str]) -> None:
    async def refusal(kind: type[Exception], **fields: Any) -> str:
        with pytest.raises(kind) as error:
            async with started(**fields):
                pass
        return str(error.value)

    async def scenario() -> None:
        twice = await refusal(InvalidJob, mcp=[{"command": counter}, {"command": counter, "tools": ["count"]}])
        assert twice.startswith('rollout.environment.mcp.1.tools: "count": ') and "both have a tool" in twice
        missing = await refusal(Unavailable, mcp=[{"command": counter, "tools": ["search"]}])
        assert "it has no tool search; its tools: count, end, hang, reach" in missing
        absent = await refusal(Unavailable, mcp=[{"command": ["/nowhere/server"]}])
        assert absent.startswith("rollout.environment.mcp.0: /nowhere/server: ")
        with held_port() as port:
            closed = await refusal(Unavailable, mcp=[{"url": f"http://127.0.0.1:{port}/mcp"}])
        assert closed.startswith("rollout.environment.mcp.0: http://127.0.0.1:")
        token = await refusal(Unavailable, mcp=[{"url": "http://127.0.0.1:9/mcp", "token_env": "MCP_TEST_ABSENT"}])
        assert "no environment variable MCP_TEST_ABSENT" in token

    asyncio.run(scenario())
    with pytest.raises(InvalidJob, match="neither a class nor tools"):
        check("tools", {})
    check("tools", {}, has_servers=True)
    for fields in ({}, {"command": ["x"], "url": "http://x"}):
        with pytest.raises(ValueError) as error:
            Environment.model_validate({"mcp": [fields]})
        assert isinstance(error.value.errors()[0]["ctx"]["error"], InvalidValue)  # type: ignore[attr-defined]
