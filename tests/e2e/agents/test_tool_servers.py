"""Servers of tools and games in examples/environments, in a whole job of real processes that trains two steps."""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from millrace.client import Client
from millrace.demo.task import Turn
from millrace.rest import SampleView
from tests.e2e.agents.trained import trained_samples
from tests.e2e.agents.warmed import save_warmed_model

# services/rollout/episodes/ has a test of each in a replica alone.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[3] / "examples/environments"
ASKED = "A capital?"
CAPITALS = {"Peru": "Lima", "Japan": "Tokyo"}


def looked_up(rng: Random) -> list[Turn]:
    """A country is looked up, then one of the capitals is said."""
    country = rng.choice(sorted(CAPITALS))
    call = f'<tool_call>{{"name": "capital", "arguments": {{"country": "{country}"}}}}</tool_call>'
    said = rng.choice(sorted(CAPITALS.values()))
    return [("user", ASKED), ("assistant", call), ("tool", CAPITALS[country]), ("assistant", said)]


def told(sample: SampleView) -> list[tuple[str, str]]:
    """The country of each call that could be read, with what the server answered."""
    found = []
    for asking, answered in zip(sample.turns, sample.turns[1:], strict=False):
        text = asking.answer.removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            found.append((json.loads(text)["arguments"]["country"], answered.given.strip()))
        except (ValueError, KeyError):
            continue
    return found


def test_a_job_trains_with_the_tool_of_an_mcp_server(client: Client, job: dict[str, Any], tmp_path: Path) -> None:
    model = save_warmed_model(tmp_path / "model", looked_up, steps=80)
    server = {"command": [sys.executable, str(EXAMPLES / "capitals.py")]}
    environment = {"mcp": [server], "renderer_options": {"tool_parser": "qwen3"}, "max_turns": 4, "processes": 1}
    job["reward"] = {"function": "exact", "workers": 1}
    truths = sorted(CAPITALS.values())
    samples = trained_samples(client, job, model, ASKED, truths, {"environment": environment})
    for sample in samples:
        last = sample.turns[-1].answer if sample.turns else sample.answer
        assert sample.reward == float(last.strip() == sample.ground_truth)
    calls = [call for sample in samples for call in told(sample)]
    known = [(country, answer) for country, answer in calls if country in CAPITALS]
    assert known and all(CAPITALS[country] in answer for country, answer in known), calls
