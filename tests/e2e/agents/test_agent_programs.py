"""The agents of examples/agents train a model in a whole job of real processes: two optimizer steps each."""

import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from shutil import which
from typing import Any

import pytest

from millrace.client import Client
from millrace.demo.tasks import Turn
from millrace.rest import SampleView
from tests.e2e.agents.trained import asking, trained_samples
from tests.e2e.agents.warmed import save_warmed_model

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
"""services/rollout/sessions/test_replica.py has what the programs sample and post, without the steps."""
EXAMPLES = Path(__file__).parents[3] / "examples/agents"
NUMBERS = "123"
ASKED = "A number?"


def said(rng: Random) -> list[Turn]:
    """A number is said at once, and another one after each that is wrong."""
    turns = [("user", ASKED), ("assistant", rng.choice(NUMBERS))]
    for _ in range(2):
        turns += [("user", "No. Try again."), ("assistant", rng.choice(NUMBERS))]
    return turns


def looked_up(rng: Random) -> list[Turn]:
    """The tool is asked once, then a number is said."""
    call = f'<tool_call>{{"name": "compare", "arguments": {{"guess": {rng.choice(NUMBERS)}}}}}</tool_call>'
    told = rng.choice(["equal", "higher", "lower"])
    return [("user", ASKED), ("assistant", call), ("tool", told), ("assistant", rng.choice(NUMBERS))]


def by_tries(sample: SampleView) -> float:
    """The reward that guess.sh posts: less for each try, 0 after the third."""
    tries = [turn.answer for turn in sample.turns] or [sample.answer]
    assert tries[-1] == sample.ground_truth or len(tries) == 3, "a right answer ends the episode"
    return {1: 1.0, 2: 0.5, 3: 0.25}[len(tries)] if tries[-1] == sample.ground_truth else 0.0


def by_last(sample: SampleView) -> float:
    """The reward function `exact`: 1 where the last turn says the number."""
    return float((sample.turns[-1].answer if sample.turns else sample.answer).strip() == sample.ground_truth)


@pytest.mark.skipif(not (which("jq") and which("curl")), reason="the example needs jq and curl")
def test_a_shell_script_trains_with_the_rewards_that_it_posts(client: Client, job: dict[str, Any], tmp_path: Path):
    model = save_warmed_model(tmp_path / "model", said, steps=40)
    asked = {"command": [str(EXAMPLES / "guess.sh")]}
    samples = trained_samples(client, job, model, asking(job, ASKED, NUMBERS), {"agent": asked}, episodes=4)
    assert [sample.reward for sample in samples] == [by_tries(sample) for sample in samples]
    assert any(len(sample.turns) > 1 for sample in samples), "some episode went on after a wrong number"


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_a_program_with_a_client_package_trains(package: str, client: Client, job: dict[str, Any], tmp_path: Path):
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    model = save_warmed_model(tmp_path / "model", looked_up, steps=80)
    command = [sys.executable, str(EXAMPLES / f"guess_{package}.py")]
    asked = {"command": command, "renderer_options": {"tool_parser": "qwen3"}}
    job["reward"] = {"function": "exact", "workers": 1}
    samples = trained_samples(client, job, model, asking(job, ASKED, NUMBERS), {"agent": asked})
    assert [sample.reward for sample in samples] == [by_last(sample) for sample in samples]
    told = {turn.given.strip() for sample in samples for turn in sample.turns[1:]}
    assert told and all(any(word in each for word in ("equal", "higher", "lower", "Error")) for each in told), told
