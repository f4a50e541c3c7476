"""What a job waits for, and when the replicas' refusals end it, with simulated peers and a real coordinator."""

import asyncio
import json
from typing import Any

from millrace.errors import InvalidJob
from millrace.rest import JobState, WaitingFor
from tests.services.coordinator.cluster import Cluster, named, scenario, until
from tests.services.coordinator.peers import SimulatedReplica


@scenario
async def test_a_job_says_what_it_waits_for(cluster: Cluster, spec: dict[str, Any]) -> None:
    async def waits(job_id: str, reason: WaitingFor) -> None:
        await until(lambda: cluster.job(job_id), lambda job: job.waiting is not None and job.waiting.reason is reason)

    job_id = await cluster.submit(spec)
    await waits(job_id, WaitingFor.TRAINER)
    assert (await cluster.job(job_id)).state is JobState.QUEUED
    await until(lambda: cluster.events(job_id, "job.waiting"))
    trainer, loaded = await cluster.trainer(), asyncio.Event()

    async def load(_: object) -> None:
        await loaded.wait()

    trainer.faults["Configure"] = load
    await waits(job_id, WaitingFor.TRAINER_LOADING)
    loaded.set()
    await waits(job_id, WaitingFor.REPLICA)
    behind = await cluster.submit(named(spec, "behind"))
    await waits(behind, WaitingFor.EARLIER_JOB)
    (told,) = await cluster.events(behind, "job.waiting")
    assert told.data.reason is WaitingFor.EARLIER_JOB and job_id in told.message
    await until(lambda: cluster.events(job_id, "job.waiting"), lambda events: len(events) == 2)
    await cluster.replica(seconds=0.05)
    await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.RUNNING and job.waiting is None)
    reasons = [event.data.reason for event in await cluster.events(job_id, "job.waiting")]
    assert reasons == [WaitingFor.TRAINER, WaitingFor.REPLICA]
    assert (await cluster.ended(job_id)).waiting is None
    assert (await cluster.ended(behind)).state is JobState.SUCCEEDED


REFUSAL = InvalidJob("rollout.engine_options.max_runing: vLLM has no such option.", "did you mean `max_running`?")


async def refuse(replica: SimulatedReplica) -> SimulatedReplica:
    """The replica accepts only the job named good."""

    async def fault(request: Any) -> None:
        if json.loads(request.spec)["name"] != "good":
            raise REFUSAL

    replica.faults["Configure"] = fault
    return replica


@scenario
async def test_a_job_that_every_replica_refuses_fails_at_once_and_the_next_one_runs(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer()
    replicas = [await refuse(await cluster.replica()) for _ in range(2)]
    bad, good = await cluster.submit(spec), await cluster.submit(named(spec, "good"))
    job = await cluster.ended(bad, within_s=15.0)
    assert (job.state, job.failure) == (JobState.FAILED, f"all 2 connected replicas refused the job: {REFUSAL}")
    failed = await cluster.events(bad, "member.failed")
    assert {event.data.member for event in failed} == {replica.id for replica in replicas}
    assert all(event.data.refused for event in failed) and not await cluster.events(bad, "member.out")
    assert (await cluster.ended(good)).state is JobState.SUCCEEDED


@scenario
async def test_a_job_that_one_replica_refuses_runs_on_the_others(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await refuse(await cluster.replica())
    serving = await cluster.replica()
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.SUCCEEDED and serving.leased


@scenario
async def test_a_replica_that_joins_soon_may_accept_what_the_others_refuse(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer(), await refuse(await cluster.replica())
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.events(job_id, "member.failed"))
    await cluster.replica()
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED


@scenario
async def test_a_job_that_was_accepted_once_waits_for_another_replica(cluster: Cluster, spec: dict[str, Any]) -> None:
    """A replica that comes after a loss, and lacks something on its host, does not end a job that has run."""
    await cluster.trainer(step_s=0.05)
    first = await cluster.replica(seconds=0.05)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    await refuse(await cluster.replica())
    await until(lambda: cluster.events(job_id, "member.failed"))
    await first.die()
    cluster.members.remove(first)
    await until(lambda: cluster.events(job_id, "member.out"))
    refused = len(await cluster.events(job_id, "member.failed"))
    await asyncio.to_thread(cluster.coordinator.stop)
    await asyncio.to_thread(cluster.coordinator.start)
    await until(lambda: cluster.events(job_id, "member.failed"), lambda events: len(events) > refused)
    await until(cluster.replica)  # its channel may remember for a moment that the coordinator was away
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
