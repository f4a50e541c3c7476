"""What is told of an evaluation whose prompts do not all have a score."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from millrace.contracts.v1 import common_pb2
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario


@scenario
async def test_a_held_out_score_says_of_how_many_prompts_it_is(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Two of five held-out prompts fail at first, then all: that is told and ends no job. The score is the `acc`."""

    def reward(lease: Any, version: int, chance: Any) -> float | None:
        if lease.purpose == common_pb2.PURPOSE_TRAIN:
            return chance.random()
        return None if version or json.loads(lease.ground_truth) in ("1", "2") else 7.0

    async def adds_acc(request: Any) -> None:
        for place, trajectory in enumerate(request.group.trajectories):
            trajectory.reward_details = json.dumps({"acc": place == 0})

    await cluster.trainer()
    replica = await cluster.replica(reward=reward)
    replica.faults["Complete"] = adds_acc
    spec["evaluation"] |= {"samples_per_prompt": 2}
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED
    assert (job.evaluation_before, str(job.evaluation_before_coverage)) == (0.5, "3 of 5")
    assert (job.evaluation_last, job.evaluation_step, str(job.evaluation_last_coverage)) == (None, 6, "0 of 5")
    rows = {row.step: row.values for row in await asyncio.to_thread(cluster.coordinator.client.metrics, job.id, -1)}
    assert rows[0]["evaluation/held_out"] == rows[0]["val-core/sums/acc/mean@2"] == 0.5
    assert (rows[0]["val-aux/scored_prompts"], rows[0]["val-aux/asked_prompts"]) == (3, 5)
    assert rows[6]["val-aux/scored_prompts"] == 0 and "evaluation/held_out" not in rows[6]
    first, last = await cluster.events(job.id, "evaluation.done")
    assert (
        first.message.startswith("held-out 0.5 at version 0 on 3 of 5 prompts; ") and "ValueError: no" in first.message
    )
    assert last.message.startswith("none of the 5 held-out prompts could be scored; ")
    report = json.loads((Path(spec["output"]) / "report.json").read_text())
    assert report["reward"]["held_out_before_prompts"] == {"scored": 3, "asked": 5}
    assert report["reward"]["held_out_after_prompts"] == {"scored": 0, "asked": 5}
    assert report["evaluations"][1] == {"step": 6.0, "val-aux/scored_prompts": 0.0, "val-aux/asked_prompts": 5.0}
    written = (Path(spec["output"]) / "report.md").read_text()
    assert "| held-out | 0.5 (3 of 5) | – (0 of 5) |" in written
    url = f"http://127.0.0.1:{cluster.coordinator.http_port}/metrics"
    exported = (await asyncio.to_thread(httpx.get, url)).text
    assert f'millrace_job_evaluation_coverage{{job_id="{job.id}"}} 0.0' in exported
    assert f'millrace_job_evaluation_reward{{job_id="{job.id}"}}' not in exported
