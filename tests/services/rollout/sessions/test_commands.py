"""Commands that play episodes: in a sandbox and without one, with every way to end."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.drops import DropReason
from millrace.errors import InvalidJob
from millrace.spec.environment import Agent
from services.rollout.episode.episode import Episode, EpisodeFailed
from services.rollout.sessions.command import check_command, code_of
from services.rollout.sessions.episodes import UNSANDBOXED, check_allowed
from tests.services.rollout.sessions.served import Served, served
from tests.services.rollout.sessions.test_sessions import trained

SECRET = """
import json, os, socket, sys
from urllib.request import Request, urlopen

def ask(path, **body):
    url, key = os.environ["MILLRACE_SESSION_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urlopen(Request(url + path, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)

kind = json.loads(os.environ["MILLRACE_PROMPT"])["extra_info"]["level"]
assert "MILLRACE_TOKEN" not in os.environ
"""


async def play(here: Served) -> Episode:
    async with asyncio.timeout(120):
        return await here.play()


def output_of(episode: Episode) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(episode.messages()[-1].metadata)["agent"]
    return told


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_command_reaches_its_session_and_its_files(
    sandbox: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "")
    agent = tmp_path / "agent.py"
    agent.write_text(
        SECRET + "ask('/v1/chat/completions', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "ask('/reward', reward=0.5)\nprint('done', kind)\n"
    )

    async def scenario() -> tuple[Served, Episode]:
        async with served(command=[sys.executable, str(agent)], sandbox=sandbox) as here:
            return here, await play(here)

    here, episode = asyncio.run(scenario())
    assert trained(episode) == here.engine.seen and episode.scored is not None and episode.scored.score == 0.5
    assert output_of(episode) == {"status": 0, "output": "done 2\n"}


def test_a_sandbox_has_no_network_but_its_session(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        SECRET + "ask('/v1/chat/completions', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "other = int(sys.argv[1])\n"
        "try:\n    socket.create_connection(('127.0.0.1', other), 5)\n    print('reached')\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )

    async def scenario() -> Episode:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, served(command=[sys.executable, str(agent), str(port)]) as here:
            return await play(here)

    assert output_of(asyncio.run(scenario()))["output"] == "ConnectionRefusedError\n"


@pytest.mark.parametrize(
    ("body", "seconds", "told"),
    [
        ("print('first'); sys.exit('no idea')", 120.0, "the command ended with status 1: no idea"),
        ("pass", 120.0, "the agent asked for no turn"),
        ("import time; time.sleep(3600)", 0.5, "the episode took longer than 0.5 s"),
    ],
)
def test_a_command_that_fails_is_run_again_and_then_dropped(
    body: str, seconds: float, told: str, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(SECRET + body)

    async def scenario() -> None:
        async with served(command=[sys.executable, str(agent)], sandbox=False, episode_s=seconds) as here:
            with pytest.raises(EpisodeFailed) as failed:
                await play(here)
            drop = failed.value.drop
            assert drop.reason is DropReason.ENVIRONMENT_FAILED and drop.detail.count(told) == 2, drop.detail

    asyncio.run(scenario())


def test_a_command_that_fails_at_a_limit_is_trained_as_it_is(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    asking = "ask('/v1/chat/completions', messages=[{'role': 'user', 'content': 'hi'}])"
    agent.write_text(f"{SECRET}while True: {asking}")

    async def scenario() -> Episode:
        async with served(command=[sys.executable, str(agent)], sandbox=False, max_turns=2) as here:
            return await play(here)

    episode = asyncio.run(scenario())
    assert len(list(episode.samples)) == 2 and "410" in output_of(episode)["output"]


def test_what_a_command_needs_is_seen_and_what_is_not_there_is_refused(tmp_path: Path) -> None:
    venv, script = tmp_path / "venv", tmp_path / "agents/agent.py"
    for file in (venv / "bin/python", venv / "pyvenv.cfg", script):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o755)
    command = [str(venv / "bin/python"), str(script), "--fast"]
    assert code_of(command) == [command[0], command[1], str(venv)]
    with pytest.raises(InvalidJob, match=r'rollout.agent.command: "no-such-program": there is no such program'):
        check_command(Agent(command=["no-such-program"]))


def test_only_an_operator_allows_commands_outside_of_a_sandbox() -> None:
    plain = Agent(command=["python", "agent.py"], sandbox=False)
    for environment in ({}, {UNSANDBOXED: ""}, {UNSANDBOXED: "0"}):
        with pytest.raises(InvalidJob, match=rf"rollout\.agent\.sandbox: false.*{UNSANDBOXED}=1"):
            check_allowed(plain, environment)
    check_allowed(plain, {UNSANDBOXED: "1"})
    for allowed in (None, Agent(command=["python", "agent.py"]), Agent(external=True)):
        check_allowed(allowed, {})
