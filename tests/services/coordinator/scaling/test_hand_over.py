"""Replicas go from one running job to another, with simulated members: nothing is lost or trained twice."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.events import EventKind, HandOverReason
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, named, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import Fault, SimulatedTrainer
from tests.services.coordinator.test_recovery import restart

STEPS = 100_000


@pytest.fixture(scope="module")
def of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with running(tmp_path_factory.mktemp("coordinator"), "--share-replicas-s", "0.3", "--lost-after-s", "3") as process:
        yield process


def job(spec: dict[str, Any], name: str, **schedule: Any) -> dict[str, Any]:
    return named(spec | {"schedule": {**spec["schedule"], **schedule}}, name)


async def places(cluster: Cluster) -> Counter[str]:
    """Replicas that serve, by partition."""
    fleet = await asyncio.to_thread(cluster.coordinator.client.fleet)
    return Counter(member.partition for member in fleet.replicas if member.state == "serving")


async def spread(cluster: Cluster, **wanted: int) -> None:
    await until(lambda: places(cluster), lambda found: found == Counter(wanted), 30.0)


async def reasons(cluster: Cluster, job_id: str) -> Counter[HandOverReason]:
    return Counter(event.data.reason for event in await cluster.events(job_id, EventKind.MEMBER_HANDED_OVER))


async def exact(cluster: Cluster, job_id: str, trainer: SimulatedTrainer) -> None:
    """The ledger of a job that was cancelled: each prompt was trained once at most, and none was lost."""
    ledger, view = await cluster.ledger(job_id), await cluster.job(job_id)
    trained = [prompt for batch in trainer.trained.values() for prompt in batch]
    assert len(trained) == len(set(trained)) and ledger.trained == 4 * view.step
    assert (ledger.queued, ledger.leased, ledger.generated) == (0, 0, 0)
    assert ledger.issued == ledger.trained + ledger.dropped and set(ledger.reasons) <= {"job_cancelled"}


@scenario
async def test_replicas_follow_the_shares_of_the_running_jobs(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainers = await cluster.trainer(step_s=0.1), await cluster.trainer("b", step_s=0.1)
    for _ in range(4):
        await cluster.replica(seconds=0.05)
    first = await cluster.submit(job(spec, "first", steps=STEPS))
    await spread(cluster, default=4)
    second = await cluster.submit(job(spec, "second", steps=STEPS))
    await spread(cluster, default=2, b=2)
    assert (await cluster.job(second)).partition == "b"
    assert await reasons(cluster, second) == {HandOverReason.FIRST: 1, HandOverReason.SHARE: 1}
    assert await reasons(cluster, first) == await reasons(cluster, second)
    await restart(cluster)
    begun = {job_id: (await cluster.job(job_id)).step for job_id in (first, second)}
    for job_id, step in begun.items():
        await cluster.reached(job_id, step + 2)
    assert await places(cluster) == {"default": 2, "b": 2}, "the coordinator knows where they work"
    await asyncio.to_thread(cluster.coordinator.client.cancel, first)
    await spread(cluster, b=4)
    third = await cluster.submit(job(spec, "third", share=3.0, steps=STEPS))
    await spread(cluster, default=3, b=1)
    for job_id in (second, third):
        await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
        assert (await cluster.ended(job_id)).state is JobState.CANCELLED
    await exact(cluster, second, trainers[1])
    await exact(cluster, third, trainers[0])
    assert (await cluster.ledger(first)).trained == 4 * (await cluster.job(first)).step


@scenario
async def test_replicas_that_name_their_partition_stay(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(step_s=0.1), await cluster.trainer("b", step_s=0.1)
    for place in ("default", "default", "", "b"):
        await cluster.replica(place, seconds=0.05)
    jobs = [await cluster.submit(job(spec, name, steps=STEPS, partition=name)) for name in ("default", "b")]
    await spread(cluster, default=2, b=2)
    assert sum((await reasons(cluster, jobs[1])).values()) == 1
    for job_id in jobs:
        await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
        await cluster.ended(job_id)


@scenario
async def test_a_replica_dies_on_its_way(cluster: Cluster, spec: dict[str, Any]) -> None:
    """What it had of the job that it left is issued again at once, not after the leases have run out."""
    trainer, _ = await cluster.trainer(step_s=0.05), await cluster.trainer("b", step_s=0.05)
    replicas = {each.id: each for each in [await cluster.replica(seconds=0.05, capacity=4) for _ in range(2)]}
    first = await cluster.submit(job(spec, "first", steps=STEPS))
    await spread(cluster, default=2)
    on_its_way, may_end = asyncio.Event(), asyncio.Event()
    working = set[str]()

    def works(member: str) -> Fault:
        async def fault(_: object) -> None:
            working.add(member)
            await may_end.wait()

        return fault

    async def wait(request: Any) -> None:
        on_its_way.set()
        await asyncio.sleep(60)

    for each in replicas.values():
        each.faults |= {"Configure": wait, "Generate": works(each.id)}
    await until(lambda: asyncio.sleep(0, len(working) == 2))
    second = await cluster.submit(job(spec, "second", steps=STEPS))
    await asyncio.wait_for(on_its_way.wait(), 30)
    (event,) = await until(lambda: cluster.events(second, EventKind.MEMBER_HANDED_OVER))
    gone = replicas.pop(event.data.member)
    held = {lease.prompt_id for lease in gone.held.values()}
    assert held, "it still works for the first job"
    await gone.die()
    may_end.set()
    (out,) = await until(lambda: cluster.events(first, EventKind.MEMBER_OUT))
    assert out.data.member == gone.id and set(out.data.prompts) == held
    (other,) = replicas.values()
    await until(lambda: asyncio.sleep(0, held <= set(other.leased)))
    for job_id in (second, first):
        await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
        await cluster.ended(job_id)
    assert not await cluster.events(first, EventKind.LEASE_EXPIRED)
    await exact(cluster, first, trainer)


@scenario
async def test_a_replica_that_refuses_a_job_goes_back(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(step_s=0.1), await cluster.trainer("b", step_s=0.1)
    replicas = [await cluster.replica(seconds=0.05) for _ in range(2)]
    first = await cluster.submit(job(spec, "first", steps=STEPS))
    await spread(cluster, default=2)
    refusing = InvalidJob("it takes no such job.", "none.")

    async def refuse(request: Any) -> None:
        if request.job_id != first:
            replicas[0].faults.pop("Configure", None)
            replicas[1].faults.pop("Configure", None)
            raise refusing

    for each in replicas:
        each.faults["Configure"] = refuse
    second = await cluster.submit(job(spec, "second", steps=STEPS))
    await spread(cluster, default=1, b=1)
    found = await reasons(cluster, second)
    assert found[HandOverReason.REFUSED] == 1 and found[HandOverReason.FIRST] == 2
    for job_id in (first, second):
        await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
        await cluster.ended(job_id)


@scenario
async def test_a_job_whose_replicas_idle_gives_one_to_a_job_whose_trainer_waits(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    await cluster.trainer(step_s=0.8), await cluster.trainer("b")
    for _ in range(4):
        await cluster.replica(seconds=0.2)
    fed = await cluster.submit(job(spec, "fed", steps=STEPS))
    await spread(cluster, default=4)
    starved = await cluster.submit(job(spec, "starved", steps=STEPS))
    await spread(cluster, default=1, b=3)
    assert (await reasons(cluster, starved))[HandOverReason.DEMAND] >= 1
    for job_id in (fed, starved):
        await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
        await cluster.ended(job_id)
