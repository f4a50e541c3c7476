"""Jobs whose trainer gets groups of a step while others are generated: what is killed, cancelled, paused, and who joins
between two parts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.errors import OutOfMemory
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.coordinator.peers import SimulatedReplica, SimulatedTrainer
from tests.services.coordinator.test_recovery import restart, trained_once

STEPS = 3


async def begun(cluster: Cluster, spec: dict[str, Any]) -> tuple[SimulatedTrainer, SimulatedReplica]:
    """A trainer for which each group is a part's worth, and a replica that completes one group after another."""
    spec["trainer"] |= {"token_budget": 16}
    spec["data"]["max_prompt_tokens"], spec["rollout"]["max_response_tokens"] = 4, 8
    spec["schedule"] |= {"max_staleness": 0, "steps": STEPS, "save_every_steps": 1}
    return await cluster.trainer(), await cluster.replica(tokens=8, seconds=0.15, capacity=2)


def between_parts(
    trainer: SimulatedTrainer, act: Callable[[], Awaitable[None]], moment: str = "AddPart"
) -> asyncio.Event:
    """Has `act` done once, at that moment of step 2, when the trainer has its first part."""
    done = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def strike(request: Any) -> None:
        if request.step == 2 and request.part >= 1 and not done.is_set():
            done.set()
            task = asyncio.ensure_future(act())
            tasks.add(task)

    trainer.faults[moment] = strike
    return done


async def succeeded(cluster: Cluster, job_id: str, trainer: SimulatedTrainer, parts: int = 3) -> None:
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert max(trainer.parts.values()) >= parts, trainer.parts
    await trained_once(cluster, job_id, trainer, steps=STEPS)


@scenario
async def test_the_trainer_gets_groups_as_they_come(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await begun(cluster, spec)
    job_id = await cluster.submit(spec)
    await succeeded(cluster, job_id, trainer)
    assert set(trainer.every.values()) == {1} and trainer.stalest == 0
    assert (await cluster.job(job_id)).whole_steps == ""
    rows = [row.values for row in await asyncio.to_thread(cluster.coordinator.client.metrics, job_id)]
    assert len(rows) == STEPS
    assert all(row["timing_s/gen"] + row["timing_s/train"] > 0.4 for row in rows), "four groups, one after another"


@scenario
async def test_what_needs_the_whole_batch_waits_for_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await begun(cluster, spec)
    spec["algorithm"] = {"preset": "reinforce++"}
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert set(trainer.parts.values()) == {1}
    reason = "algorithm.advantage: reinforce_plus_plus is computed over the whole batch"
    assert job.whole_steps == reason
    configured = (await cluster.events(job_id, "trainer.configured"))[0]
    assert configured.data.whole_steps == reason and reason in configured.message


@pytest.mark.parametrize("moment", ["AddPart", "AddPartDone", "Step", "StepDone"])
def test_the_coordinator_is_killed_in_a_part(moment: str, shared: CoordinatorProcess, spec: dict[str, Any]) -> None:
    """What the trainer had stays with it, and is not trained twice."""

    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        trainer, _ = await begun(cluster, spec)

        async def kill() -> None:
            await restart(cluster)

        killed = between_parts(trainer, kill, moment)
        job_id = await cluster.submit(spec)
        await asyncio.wait_for(killed.wait(), 60)
        await succeeded(cluster, job_id, trainer)
        assert set(trainer.every.values()) == {1} and len(trainer.configured) == 1

    played(shared, spec)


@scenario
async def test_another_trainer_gets_all_parts_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It continues from the checkpoint of the last step: no group is generated again."""
    first, replica = await begun(cluster, spec)
    others: list[SimulatedTrainer] = []

    async def replace() -> None:
        await first.die()
        others.append(await cluster.trainer())

    lost = between_parts(first, replace, "AddPartDone")
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(lost.wait(), 60)
    await until(lambda: asyncio.sleep(0, bool(others)))
    await succeeded(cluster, job_id, others[0])
    assert len(others[0].configured) == 1 and others[0].configured[0].endswith("step-1")
    assert len(replica.leased) == len(set(replica.leased))


@scenario
async def test_a_job_that_is_cancelled_between_parts_goes_on_later(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await begun(cluster, spec)
    client = cluster.coordinator.client

    async def cancel() -> None:
        await asyncio.to_thread(client.cancel, job_id)

    cancelled = between_parts(trainer, cancel)
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(cancelled.wait(), 60)
    job = await cluster.ended(job_id)
    assert (job.state, job.step) == (JobState.CANCELLED, 1)
    await asyncio.to_thread(client.resume, job_id)
    await succeeded(cluster, job_id, trainer)


@scenario
async def test_a_pause_between_parts_is_heeded_and_they_stay(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await begun(cluster, spec)
    client = cluster.coordinator.client

    async def pause() -> None:
        await asyncio.to_thread(client.pause, job_id)

    between_parts(trainer, pause)
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.PAUSED)
    assert trainer.version == 1 and 1 <= len(trainer.added) < 4
    await asyncio.to_thread(client.resume, job_id)
    await succeeded(cluster, job_id, trainer)
    assert set(trainer.every.values()) == {1} and len(trainer.configured) == 1


@scenario
async def test_a_replica_that_joins_between_parts_gets_the_current_weights(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    trainer, first = await begun(cluster, spec)
    late: list[SimulatedReplica] = []

    async def join() -> None:
        late.append(await cluster.replica(tokens=8, seconds=0.15, capacity=2))

    first.shape.seconds = 0.5
    joined = between_parts(trainer, join)
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(joined.wait(), 60)
    await until(lambda: asyncio.sleep(0, bool(late and late[0].publications)))
    assert late[0].publications[0] == 1
    await succeeded(cluster, job_id, trainer)
    assert late[0].leased


@scenario
async def test_a_part_without_memory_begins_the_step_anew_with_half_the_budget(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    trainer, _ = await begun(cluster, spec)
    spec["trainer"] |= {"token_budget": 22, "on_out_of_memory": "halve_budget"}
    refused: list[int] = []

    async def limit(request: Any) -> None:
        if request.step == 2 and request.part == 1 and not request.token_budget:
            refused.append(len(trainer.added))
            trainer.added = []
            raise OutOfMemory("rank 0 ran out of memory.", "train on more GPUs.")

    trainer.faults["AddPart"] = limit
    job_id = await cluster.submit(spec)
    await succeeded(cluster, job_id, trainer)
    assert refused == [1] and set(trainer.every.values()) == {1}
    (told,) = await cluster.events(job_id, "trainer.out_of_memory")
    assert (told.data.step, told.data.token_budget) == (2, 11)
