"""Servers of tools and games in examples/environments, in a whole job of real processes that trains two steps."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from millrace.client import Client
from millrace.demo.tasks import Turn
from tests.e2e.agents.trained import asking, trained_samples
from tests.e2e.agents.warmed import save_warmed_model
from tests.services.rollout.environments.test_openenv import PYTHON, number_server

# services/rollout/environments/ and sessions/ have a test of each in a replica alone.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[3] / "examples/environments"
ASKED = "A capital?"
CAPITALS = {"Peru": "Lima", "Japan": "Tokyo"}


def call(tool: str, **arguments: Any) -> str:
    """The text of a call."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def looked_up(rng: Random) -> list[Turn]:
    """A country is looked up, then one of the capitals is said."""
    country = rng.choice(sorted(CAPITALS))
    said = rng.choice(sorted(CAPITALS.values()))
    return [
        ("user", ASKED),
        ("assistant", call("capital", country=country)),
        ("tool", CAPITALS[country]),
        ("assistant", said),
    ]


def test_a_job_trains_with_the_tool_of_an_mcp_server(client: Client, job: dict[str, Any], tmp_path: Path) -> None:
    model = save_warmed_model(tmp_path / "model", looked_up, steps=80)
    server = {"command": [sys.executable, str(EXAMPLES / "capitals.py")]}
    environment = {"mcp": [server], "renderer_options": {"tool_parser": "qwen3"}, "max_turns": 4, "processes": 1}
    job["reward"] = {"function": "exact", "workers": 1}
    truths = sorted(CAPITALS.values())
    samples = trained_samples(client, job, model, asking(job, ASKED, truths), {"environment": environment})
    for sample in samples:
        last = sample.turns[-1].answer if sample.turns else sample.answer
        assert sample.reward == float(last.strip() == sample.ground_truth)
    pairs = [pair for sample in samples for pair in zip(sample.turns, sample.turns[1:], strict=False)]
    known = {call("capital", country=country): capital for country, capital in CAPITALS.items()}
    told = [(known[asking.answer], answered.given) for asking, answered in pairs if asking.answer in known]
    assert told and all(capital in given for capital, given in told), told


def guessed(rng: Random) -> list[Turn]:
    """Two guesses of a number up to 3."""
    turns = [("user", ASKED), ("user", "I think of a number from 1 to 100. Guess it.")]
    for answer in ("higher", "lower"):
        turns += [("assistant", call("act", guess=rng.randint(1, 3))), ("tool", answer)]
    return turns[:-1]


@pytest.fixture
def number_url() -> Iterator[str]:
    """The example's server where there is openenv-core; otherwise one of the tests that speaks its protocol."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(number_server(bool(PYTHON))) as url:
        yield url


def test_a_job_trains_with_the_rewards_of_an_openenv_server(
    client: Client, job: dict[str, Any], tmp_path: Path, number_url: str
) -> None:
    model = save_warmed_model(tmp_path / "model", guessed, steps=80)
    options = {"url": number_url, "observation_field": "text", "reset": {"number": 2}}
    environment = {"name": "openenv", "options": options, "max_turns": 2, "processes": 8}
    environment["renderer_options"] = {"tool_parser": "qwen3"}
    job["reward"] = {"function": "exact", "workers": 1}
    samples = trained_samples(client, job, model, asking(job, ASKED, "2"), {"environment": environment})
    known = {call("act", guess=number): number for number in (1, 2, 3)}
    turns = [turn for sample in samples for turn in sample.turns if turn.answer in known]
    earned = {(known[turn.answer], round(turn.reward, 6)) for turn in turns}
    assert earned == {(1, -0.05), (2, 1.0), (3, -0.05)}
