"""An environment of verifiers as it is installed, in a host of its own: a whole job of real processes trains with it.

`make test-environments` runs it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from millrace.client import Client
from millrace.rest import SampleView
from tests.e2e.agents.trained import trained_samples
from tests.services.rollout.sessions.test_verifiers import PYTHON, Host, hosted
from tests.services.rollout.sessions.test_verifiers import model as long_model

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs verifiers"),
    pytest.mark.e2e,
    pytest.mark.matrix,  # services/rollout/sessions/test_verifiers.py has the episodes without the steps
    pytest.mark.timeout(600),
]
model = long_model


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Host, list[dict[str, Any]]]]:
    """The host of the example, and the rows of its tasks."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(hosted(tmp_path)) as started:
        yield started


def test_an_unchanged_environment_trains_with_its_rewards(
    client: Client, job: dict[str, Any], model: Path, host: tuple[Host, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """An episode of two turns earns the share of the alphabet that they use. What the model says is no text that can be
    made into the same tokens again, so that each turn is a trajectory of its own."""
    served, rows = host
    environment = {"name": "verifiers", "options": {"url": f"http://127.0.0.1:{served.port}"}, "max_turn_tokens": 8}
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"files": [str(tmp_path / "tasks.jsonl")], "max_prompt_tokens": 3000}
    job["trainer"]["token_budget"] = 16384
    rollout = {"environment": environment, "max_response_tokens": 3000}
    samples = trained_samples(client, job, model, data, rollout, episodes=4, trajectories=2)
    played: dict[tuple[int, str, int], list[SampleView]] = {}
    for sample in samples:
        played.setdefault((sample.step, sample.prompt_id, sample.episode), []).append(sample)
    for trajectories in played.values():
        (reward,) = [each.reward for each in trajectories if each.reward is not None]
        (details,) = [each.details for each in trajectories if each.details]
        used = {letter for each in trajectories for letter in each.answer.lower() if "a" <= letter <= "z"}
        assert reward == pytest.approx(len(used) / 26, abs=1e-6) == details["openenv_reward"]
