"""Replicas of a job's pools: found, shown, waited for, and never given prompts or weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from millrace.cli import app
from millrace.contracts.methods import FleetRpc, WorkRpc
from millrace.contracts.v1 import fleet_pb2, work_pb2
from millrace.errors import InvalidJob
from millrace.rest import JobState, JobView, WaitingFor
from millrace.wire.channel import Peer
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.fleet.simulated_scorer import SimulatedScorer


def with_pool(spec: dict[str, Any]) -> dict[str, Any]:
    """The job with a reward model, as far as its folder is looked at without being loaded."""
    folder = Path(spec["model"]["path"]).with_name("reward-model")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    functions = [{"name": "right", "function": "exact"}, {"name": "liked", "pool": "quality", "weight": 0.5}]
    return spec | {"pools": [{"name": "quality", "path": str(folder)}], "reward": {"functions": functions}}


async def scorer(cluster: Cluster) -> SimulatedScorer:
    joined = SimulatedScorer(cluster.coordinator.address, "quality")
    await joined.start()
    cluster.members.append(joined)
    return joined


async def found(cluster: Cluster, job_id: str, wait_s: float) -> list[str]:
    peer = Peer(cluster.coordinator.address)
    request = fleet_pb2.FindPoolRequest(job_id=job_id, pool="quality", wait_s=wait_s)
    addresses = list((await peer.call(FleetRpc.FindPool, request)).addresses)
    await peer.close()
    return addresses


@scenario
async def test_a_job_with_a_pool(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica(seconds=0.3)
    trainer.step_s = 0.3
    job_id = await cluster.submit(with_pool(spec))

    def waits(job: JobView) -> bool:
        return job.waiting is not None and job.waiting.reason is WaitingFor.POOL

    assert waits(await until(lambda: cluster.job(job_id), waits))
    assert await found(cluster, job_id, 0.0) == []
    looking = asyncio.create_task(found(cluster, job_id, 25.0))
    one = await scorer(cluster)
    assert await looking == [one.address] and await found(cluster, "job-of-others", 0.0) == []
    assert one.configured == [job_id] and job_id in replica.configured
    fleet = await asyncio.to_thread(cluster.coordinator.client.fleet)
    told = {member.id: (member.pool, member.state) for member in fleet.replicas}
    assert told[one.id] == ("quality", "serving") and told[replica.id][0] == "rollout"
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["fleet", "--url", cluster.coordinator.client.url])
    assert "pool quality" in " ".join(shown.output.split())

    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert one.id not in {receiver for _, receivers in trainer.sent for receiver in receivers}
    joined = [event.data.pool for event in await cluster.events(job_id, "member.configured")]
    assert sorted(joined) == ["quality", "rollout"]


@scenario
async def test_a_pool_gets_no_leases_and_a_lost_replica_is_found_no_more(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    _, _, one = await cluster.trainer(), await cluster.replica(seconds=0.1), await scorer(cluster)
    spec["schedule"]["steps"] = 10_000
    job_id = await cluster.submit(with_pool(spec))
    await until(lambda: cluster.job(job_id), lambda job: job.step >= 1)
    assert await found(cluster, job_id, 25.0) == [one.address]
    lease = work_pb2.LeaseRequest(member_id=one.id, free_samples=8, wait_s=0.0)
    answer = await one.coordinator.call(WorkRpc.Lease, lease)
    assert not answer.leases and "of the pool quality, which generates nothing" in answer.idle_reason
    other = await scorer(cluster)
    await one.die()
    await until(lambda: found(cluster, job_id, 1.0), lambda addresses: addresses == [other.address])
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    assert (await cluster.ended(job_id)).state is JobState.CANCELLED


@scenario
async def test_a_job_whose_pool_stays_empty_fails_in_time(cluster: Cluster, spec: dict[str, Any]) -> None:
    """The simulated replica answers without the pool, so the job looks for it only between two steps."""
    await cluster.trainer()
    await cluster.replica(seconds=0.1)
    spec["schedule"]["steps"] = 10_000
    job = await cluster.ended(await cluster.submit(with_pool(spec) | {"deadlines": {"no_replica_s": 1.0}}))
    assert job.state is JobState.FAILED
    assert "no replica of the pool quality has served the job for 1 s" in str(job.failure)


@scenario
async def test_a_job_that_a_pool_refuses_fails_with_its_words(cluster: Cluster, spec: dict[str, Any]) -> None:
    _, one = await cluster.trainer(), await scorer(cluster)
    await cluster.replica(seconds=0.1)
    spec["schedule"]["steps"] = 10_000
    one.faults.once("Configure", InvalidJob("pools.0.path: it has 2 labels.", "give another model."), times=1000)
    job = await cluster.ended(await cluster.submit(with_pool(spec)))
    assert job.state is JobState.FAILED
    assert "the only connected replica of the pool quality refused the job: pools.0.path: it has 2" in str(job.failure)
