"""A judge in a replica: while it is down scores wait, generation goes on and leases are kept; then all goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from millrace.drops import DropReason
from millrace.spec import JobSpec
from millrace.telemetry.metrics.declaration import Owner
from services.rollout.judges import client
from tests.deploy.expressions import NEEDS_GPU, without_data
from tests.services.rollout.coordinator import Coordinator, until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.judges.judge_server import Failure, said, serving
from tests.services.rollout.stack import replica_stack

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.05)


def judged_job(model: Path, url: str, **fields: Any) -> JobSpec:
    judge = {"url": url, "model": "j", "prompt": "{{conversation}}|{{ground_truth}}", **fields}
    functions = [{"name": "right", "function": "exact"}, {"name": "quality", "judge": judge, "weight": 0.5}]
    return job_spec(model, reward={"function": "auto", "functions": functions, "workers": 1})


def test_scores_wait_for_a_judge_that_is_down_and_generation_goes_on(tied_model: Path) -> None:
    async def scenario() -> tuple[Coordinator, list[str], str]:
        async with serving(lambda _: Failure(503, {}, "loading")) as server, replica_stack(lease_s=0.6) as stack:
            coordinator = stack.coordinator
            await stack.serve(judged_job(tied_model, server.url))
            for number in range(3):
                coordinator.issue(number, ground_truth=f"truth {number}", samples=4)
            await until(lambda: any(beat.judge_outages for beat in coordinator.beats), WAIT_S)
            await until(lambda: stack.replica.judges[0].client.waiting == 12, WAIT_S)
            extends = coordinator.extends
            await until(lambda: coordinator.extends > extends + 6, WAIT_S)  # twice as long as a lease lasts
            tokens = stack.replica.leases.generated_tokens
            coordinator.issue(3, ground_truth="truth 3", samples=4)
            await until(lambda: stack.replica.leases.generated_tokens > tokens, WAIT_S)
            assert coordinator.answered == 0 and coordinator.released == []
            page = stack.replica.metrics
            page.refresh()
            assert page.registry.get_sample_value("millrace_judge_down_seconds", {"judge": "quality"}) > 0.6
            reason = next(beat.judge_outages[0] for beat in coordinator.beats if beat.judge_outages).reason
            server.reply = lambda _: "score: 0.5"
            await until(lambda: coordinator.answered == 4, WAIT_S)
            beats = len(coordinator.beats)
            await until(lambda: len(coordinator.beats) > beats + 1, WAIT_S)
            page.refresh()
            lacking = without_data(generate_latest(page.registry).decode(), Owner.REPLICA, NEEDS_GPU)
            assert not [panel for panel in lacking if "_judge_" in panel]
            answered = {"judge": "quality", "outcome": "answered"}
            assert page.registry.get_sample_value("millrace_judge_requests_total", answered) == 16
            return coordinator, [said(body) for body in server.asked], reason

    coordinator, told, reason = asyncio.run(scenario())
    assert reason == "status 503: loading"
    assert sorted(coordinator.groups) == ["0-0", "0-1", "0-2", "0-3"] and coordinator.dropped == {}
    assert not coordinator.beats[-1].judge_outages
    for group in coordinator.groups.values():
        assert [t.reward for t in group.trajectories] == [0.25] * 4
        assert '"quality": 0.5' in group.trajectories[0].reward_details
    begins = "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n"
    text = coordinator.groups["0-0"].trajectories[0].text
    assert f"{begins}{text}|truth 0" in told


def test_a_judge_that_stays_down_costs_the_groups_that_waited(tied_model: Path) -> None:
    async def scenario() -> Coordinator:
        async with serving(lambda _: Failure(500)) as server, replica_stack() as stack:
            await stack.serve(judged_job(tied_model, server.url, deadline_s=0.5))
            stack.coordinator.issue(0, samples=2)
            await until(lambda: stack.coordinator.answered == 1, WAIT_S)
            return stack.coordinator

    (drop,) = asyncio.run(scenario()).dropped.values()
    assert drop.reason is DropReason.REWARD_FAILED
    assert drop.detail.startswith("quality did not answer for 0.5 s: status 500")
