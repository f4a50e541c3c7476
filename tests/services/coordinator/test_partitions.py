"""Several jobs at once, each in a partition of the fleet. What happens in one touches no other."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.client import Client
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidJob, InvalidRequest, InvalidState
from millrace.events import EventKind
from millrace.rest import JobState, JobView, WaitingFor
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from tests.services.coordinator.cluster import Cluster, around, named, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import SimulatedReplica, SimulatedTrainer
from tests.services.coordinator.test_recovery import restart, trained_once

PLACES = ("a", "b")
TROUBLE = {
    EventKind.MEMBER_DIED,
    EventKind.MEMBER_OUT,
    EventKind.TRAINER_LOST,
    EventKind.JOB_REWOUND,
    EventKind.LEASE_EXPIRED,
    EventKind.PUBLICATION_FAILED,
}


async def members(cluster: Cluster, place: str, step_s: float = 0.1) -> tuple[SimulatedTrainer, SimulatedReplica]:
    return await cluster.trainer(place, step_s=step_s), await cluster.replica(place, seconds=0.05)


def there(spec: dict[str, Any], place: str, **schedule: Any) -> dict[str, Any]:
    """The job, to run in this partition."""
    return named(spec | {"schedule": {**spec["schedule"], "partition": place, **schedule}}, f"in-{place}")


async def both(cluster: Cluster, spec: dict[str, Any], step: int = 1) -> list[str]:
    """Two jobs that run, after `step` steps of each."""
    jobs = [await cluster.submit(there(spec, place)) for place in PLACES]
    for job_id in jobs:
        await cluster.reached(job_id, step)
    return jobs


async def untouched(cluster: Cluster, job_id: str, trainer: SimulatedTrainer, replicas: Sequence[str]) -> None:
    """The job ends as if it were alone."""
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    await trained_once(cluster, job_id, trainer)
    assert (await cluster.ledger(job_id)).reasons == {} and set(trainer.every.values()) == {1}
    events = await cluster.events(job_id)
    assert not {event.kind for event in events} & TROUBLE
    joined = {event.data.member for event in events if event.kind == EventKind.MEMBER_JOINED}
    assert joined == set(replicas)


@scenario
async def test_two_jobs_run_side_by_side_and_a_cancel_ends_only_one(cluster: Cluster, spec: dict[str, Any]) -> None:
    (first, _), (second, replica) = [await members(cluster, place) for place in PLACES]
    jobs = await both(cluster, spec)
    seen = [await cluster.job(job_id) for job_id in jobs]
    assert [(job.state, job.partition, job.waiting) for job in seen] == [
        (JobState.RUNNING, place, None) for place in PLACES
    ]
    await asyncio.to_thread(cluster.coordinator.client.cancel, jobs[0])
    ended = await cluster.ended(jobs[0])
    assert ended.state is JobState.CANCELLED and ended.step < 6
    assert first.job_id == jobs[0], "the other job did not get this trainer"
    await untouched(cluster, jobs[1], second, [replica.id])


@scenario
async def test_a_crash_of_all_members_of_one_partition_leaves_the_other_alone(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    (trainer, replica), (other, its_replica) = [await members(cluster, place) for place in PLACES]
    jobs = await both(cluster, spec)
    for one in (trainer, replica):
        await one.die()
    died = (EventKind.MEMBER_DIED, EventKind.TRAINER_LOST)
    await until(lambda: cluster.events(jobs[0]), lambda events: {e.kind for e in events}.issuperset(died))
    await untouched(cluster, jobs[1], other, [its_replica.id])
    job = await cluster.job(jobs[0])
    assert job.state is JobState.RUNNING and job.waiting is not None and job.waiting.reason is WaitingFor.TRAINER
    again = await cluster.trainer("b")  # of the other partition: of no use here
    assert (await cluster.job(jobs[0])).waiting is not None and again.job_id == ""
    again, _ = await members(cluster, "a", step_s=0.0)
    assert (await cluster.ended(jobs[0])).state is JobState.SUCCEEDED
    await trained_once(cluster, jobs[0], again)


@scenario
async def test_a_job_that_fails_leaves_its_partition_to_the_next_one_and_the_other_alone(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    (trainer, _), (other, replica) = [await members(cluster, place) for place in PLACES]
    trainer.faults.once("Step", InvalidJob("the trainer refuses this step.", "none."))
    jobs = [await cluster.submit(there(spec, place)) for place in PLACES]
    assert (await cluster.ended(jobs[0])).state is JobState.FAILED
    next_one = await cluster.submit(named(there(spec, "a"), "next"))
    assert (await cluster.ended(next_one)).state is JobState.SUCCEEDED
    await untouched(cluster, jobs[1], other, [replica.id])


@scenario
async def test_a_coordinator_that_is_killed_goes_on_with_both(cluster: Cluster, spec: dict[str, Any]) -> None:
    (first, _), (second, _) = [await members(cluster, place) for place in PLACES]
    jobs = await both(cluster, spec)
    await restart(cluster)
    for job_id in jobs:
        await cluster.reached(job_id, 3)
    await restart(cluster)
    for job_id, trainer in zip(jobs, (first, second), strict=True):
        job = await cluster.ended(job_id)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert set(trainer.every.values()) == {1} and trainer.job_id == job_id
        await trained_once(cluster, job_id, trainer)


@scenario
async def test_jobs_of_no_partition_go_where_a_trainer_is_free(cluster: Cluster, spec: dict[str, Any]) -> None:
    for place in ("", "b"):
        await members(cluster, place)
    jobs = [await cluster.submit(named(spec, f"job-{number}")) for number in range(3)]

    def waits(job: JobView) -> bool:
        return job.waiting is not None and job.waiting.reason is WaitingFor.EARLIER_JOB

    await until(lambda: cluster.job(jobs[2]), waits)
    ended = [await cluster.ended(job_id) for job_id in jobs]
    assert {job.partition for job in ended} == {"default", "b"} == {job.partition for job in ended[:2]}
    assert {job.state for job in ended} == {JobState.SUCCEEDED}
    starts = [[e.time_s for e in await cluster.events(i) if "starting in" in e.message] for i in jobs[:2]]
    assert max(start for (start,) in starts) < min(job.finished_s or 0.0 for job in ended[:2]), "at the same time"


@scenario
async def test_a_job_waits_for_its_partition_and_holds_up_nobody(cluster: Cluster, spec: dict[str, Any]) -> None:
    await members(cluster, "a", step_s=0.0)
    elsewhere = await cluster.submit(there(spec, "nowhere", priority=9))
    waiting = (await cluster.job(elsewhere)).waiting
    assert waiting is not None and waiting.reason is WaitingFor.TRAINER
    assert waiting.message == "no trainer is connected to the partition nowhere"
    assert (await cluster.ended(await cluster.submit(named(spec, "anywhere")))).partition == "a"
    job = await cluster.job(elsewhere)
    assert (job.state, job.partition, job.priority) == (JobState.QUEUED, "nowhere", 9)
    await asyncio.to_thread(cluster.coordinator.client.cancel, elsewhere)


@scenario
async def test_a_job_that_could_run_in_several_partitions_says_once_what_it_waits_for(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    for place in PLACES:
        await cluster.replica(place)
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.events(job_id, EventKind.JOB_WAITING))
    await cluster.trainer("b", step_s=0.2)
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    waits = [event.data.reason for event in await cluster.events(job_id, EventKind.JOB_WAITING)]
    assert waits.count(WaitingFor.TRAINER) == 1


@scenario
async def test_a_job_of_higher_priority_comes_first(cluster: Cluster, spec: dict[str, Any]) -> None:
    jobs = [
        await cluster.submit(named(spec | {"schedule": {**spec["schedule"], "steps": 1, "priority": p}}, f"of-{p}"))
        for p in (0, -5, 5)
    ]
    await members(cluster, "", step_s=0.0)
    ended = [await cluster.ended(job_id) for job_id in jobs]
    finished = [job.finished_s or 0.0 for job in ended]
    assert finished[2] < finished[0] < finished[1]


@scenario
async def test_a_member_stays_in_its_partition(cluster: Cluster, spec: dict[str, Any]) -> None:
    coordinator = Peer(cluster.coordinator.address)

    async def register(partition: str) -> None:
        request = fleet_pb2.RegisterRequest(
            member_id="rollout-1",
            kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
            address="127.0.0.1:1",
            protocol_version=PROTOCOL_VERSION,
            partition=partition,
        )
        await coordinator.call(FleetRpc.Register, request)

    await register("b")
    await register("b")
    with pytest.raises(InvalidState, match=r"rollout-1 is of the partition b, and registers in default"):
        await register("")
    for wrong in ("B", "a b", "x" * 65, "../a"):
        with pytest.raises(InvalidRequest, match=r"partition"):
            await register(wrong)
    fleet = await asyncio.to_thread(cluster.coordinator.client.fleet)
    assert ("rollout-1", "b") in {(member.id, member.partition) for member in fleet.replicas}
    await coordinator.call(FleetRpc.Leave, fleet_pb2.LeaveRequest(member_id="rollout-1"))
    await coordinator.close()


ADMIN = "the-token-of-the-services"


def test_two_users_side_by_side_within_their_quota(
    tmp_path: Path, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", ADMIN)

    async def played(coordinator: CoordinatorProcess) -> None:
        admin = Client(coordinator.client.url, ADMIN)
        ann, bob = (Client(admin.url, admin.add_user(name).token) for name in ("ann", "bob"))
        coordinator.client = admin
        async with around(coordinator) as cluster:
            trainers = [(await members(cluster, place))[0] for place in PLACES]
            jobs = [ann.submit(named(spec, name)).id for name in ("first", "second")]
            jobs.append((await asyncio.to_thread(bob.submit, named(spec, "third"))).id)
            await cluster.reached(jobs[2], 1)
            waiting = (await cluster.job(jobs[1])).waiting
            assert waiting is not None and waiting.reason is WaitingFor.QUOTA
            assert waiting.message == "ann has as many active jobs as one user may have: 1"
            assert [job.id for job in ann.jobs()] == [jobs[1], jobs[0]] and [job.id for job in bob.jobs()] == jobs[2:]
            await asyncio.to_thread(bob.cancel, jobs[2])
            assert (await cluster.ended(jobs[2])).state is JobState.CANCELLED
            ended = [await cluster.ended(job_id) for job_id in jobs[:2]]
            assert [job.state for job in ended] == [JobState.SUCCEEDED] * 2
            spans = [[e.time_s for e in await cluster.events(i) if "starting in" in e.message] for i in jobs[:2]]
            assert spans[1][0] >= (ended[0].finished_s or 0.0), "ann's jobs ran one after another"
            assert sum(trainer.every.total() for trainer in trainers) >= 2 * 24

    with running(tmp_path / "users", "--jobs-per-user", "1", environment={"MILLRACE_TOKEN": ADMIN}) as coordinator:
        asyncio.run(played(coordinator))
