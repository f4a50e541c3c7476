"""Checkpoints that the trainer writes beside its steps: the job counts one as there when it is, and not before."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidState, OutOfMemory
from millrace.rest import JobState
from millrace.spec.schedule import Schedule
from services.coordinator.stages.checkpoint import _prune
from services.coordinator.store import Store
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.peers import SimulatedTrainer, write_state
from tests.services.coordinator.redis import a_job, with_store
from tests.services.coordinator.test_recovery import trained_once

FULL = InvalidState("version 2 was not saved to /out: rank 1 on node-b (pid 7): [Errno 28] No space left on device.")


def at(spec: dict[str, Any], step: int) -> str:
    return str(Path(spec["output"]) / "checkpoints" / f"step-{step}")


@scenario
async def test_steps_go_on_while_one_is_written(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 2
    written = asyncio.Event()

    async def slow(_: object) -> None:
        await written.wait()

    trainer.faults["FinishSave"] = slow
    job_id = await cluster.submit(spec)
    job = await cluster.reached(job_id, 3)
    assert job.checkpoint is None and await cluster.events(job_id, "checkpoint.saved") == []
    await asyncio.sleep(0.3)
    assert (await cluster.job(job_id)).step <= 4  # the save of step 4 waits
    written.set()
    job = await cluster.ended(job_id)
    assert (job.state, job.checkpoint) == (JobState.SUCCEEDED, at(spec, 6))
    saved = await cluster.events(job_id, "checkpoint.saved")
    assert [event.data.step for event in saved] == [2, 4, 6] and trainer.most_at_once == 1
    rows = {row.step: row.values for row in cluster.coordinator.client.metrics(job_id)}
    assert all("timing_s/save_checkpoint" in rows[step] for step in (2, 4, 6))
    assert "timing_s/save_checkpoint_background" not in rows[2] and "timing_s/save_checkpoint_background" in rows[4]


@scenario
async def test_a_job_may_wait_for_the_disk(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(save_s=0.3), await cluster.replica()
    spec["schedule"] |= {"save_every_steps": 2, "save_in_background": False, "steps": 4}
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.checkpoint) == (JobState.SUCCEEDED, at(spec, 4))
    rows = {row.step: row.values for row in cluster.coordinator.client.metrics(job.id)}
    assert all(rows[step]["timing_s/save_checkpoint"] > 0.3 for step in (2, 4))


@scenario
async def test_one_that_cannot_be_written_is_told_and_the_job_goes_on(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 1
    trainer.faults.once("FinishSave", FULL)
    trainer.faults.once("Save", InvalidState("the checkpoint cannot be written to /out: read-only."))
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.checkpoint) == (JobState.SUCCEEDED, at(spec, 6))
    failed = await cluster.events(job.id, "checkpoint.failed")
    assert [event.data.step for event in failed] == [1, 2]
    saved = await cluster.events(job.id, "checkpoint.saved")
    assert [event.data.step for event in saved] == [3, 4, 5, 6]
    assert "read-only" in failed[0].message and "rank 1 on node-b (pid 7): [Errno 28]" in failed[1].message
    await trained_once(cluster, job.id, trainer)


@scenario
async def test_one_that_fails_after_the_last_step_costs_itself_too(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 4

    async def full(request: Any) -> None:
        if request.path.endswith("step-4"):
            await until(lambda: asyncio.sleep(0, trainer.version == 6))
            raise FULL

    trainer.faults["FinishSave"] = full
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.failure, job.checkpoint) == (JobState.SUCCEEDED, None, at(spec, 6))
    assert [event.data.step for event in await cluster.events(job.id, "checkpoint.failed")] == [4]


@scenario
async def test_a_job_whose_last_one_cannot_be_written_fails_with_the_one_before(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 4

    async def full(request: Any) -> None:
        if request.path.endswith("step-6"):
            raise FULL

    trainer.faults["FinishSave"] = full
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.checkpoint) == (JobState.FAILED, at(spec, 4))
    assert "checkpoint of step 6 was not saved" in str(job.failure) and "No space left" in str(job.failure)


async def lost_at(moment: str, cluster: Cluster, spec: dict[str, Any], *, forgotten: bool = False) -> list[str]:
    """What the next trainer is configured from, after the first died at `moment` of its save of step 4. `forgotten`:
    there is one of that step already, of other prompts."""
    first, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 2
    dying: list[asyncio.Task[None]] = []

    async def die(request: Any) -> None:
        if request.path.endswith("step-4"):
            dying.append(asyncio.create_task(first.die()))
            await asyncio.sleep(60)

    first.faults[moment] = die
    job_id = await cluster.submit(spec)
    if forgotten:
        write_state(Path(at(spec, 4)), {"version": 4, "trained": {}})
    await until(lambda: asyncio.sleep(0, dying), within_s=20)
    await dying[0]
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    await trained_once(cluster, job_id, second)
    return second.configured


@scenario
async def test_a_trainer_that_dies_while_it_writes_leaves_the_one_before(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    assert await lost_at("FinishSave", cluster, spec) == [at(spec, 2)]


@scenario
async def test_one_of_steps_that_were_forgotten_is_not_taken_for_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    """A restored backup knows nothing of the checkpoints that were written after it."""
    assert await lost_at("FinishSave", cluster, spec, forgotten=True) == [at(spec, 2)]


@scenario
async def test_what_was_written_before_the_trainer_died_counts(cluster: Cluster, spec: dict[str, Any]) -> None:
    assert await lost_at("SaveDone", cluster, spec) == [at(spec, 4)]


@scenario
async def test_a_cancelled_job_ends_when_its_checkpoint_is_there(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(save_s=1.0), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 2
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 3)
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    job = await cluster.ended(job_id)
    assert job.state is JobState.CANCELLED and job.checkpoint in (at(spec, 2), at(spec, 4))


@scenario
async def test_a_trainer_that_drains_may_finish_its_checkpoint(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It takes no step any more. The job waits for the checkpoint and goes on from it with the next trainer, which is
    there already."""
    first, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 2
    draining, written = asyncio.Event(), asyncio.Event()

    async def drains(_: object) -> None:
        if not draining.is_set():
            await first.coordinator.call(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=first.id))
            draining.set()
        await written.wait()

    first.faults["FinishSave"] = drains
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(draining.wait(), 30)
    second = await cluster.trainer()
    await asyncio.sleep(0.5)  # in which the other one could have taken the seat
    assert second.configured == [] and await cluster.events(job_id, "trainer.left") == []
    written.set()
    await until(lambda: cluster.events(job_id, "trainer.left"))
    await first.leave()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [at(spec, first.version)], "of step 2, or of step 3 if that had begun before the drain"
    assert await cluster.events(job_id, "checkpoint.failed") == []
    await trained_once(cluster, job_id, second)


def drains_in(trainer: SimulatedTrainer, step: int) -> None:
    """The trainer is asked to leave while it makes that step."""

    async def drains(request: Any) -> None:
        if request.step == step:
            answer = await trainer.coordinator.call(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=trainer.id))
            assert answer.save_follows

    trainer.faults["Step"] = drains


@scenario
async def test_a_trainer_that_drains_saves_the_step_that_it_holds(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Though no checkpoint is due: the next one loses no step."""
    first, _ = await cluster.trainer(), await cluster.replica()
    drains_in(first, 3)
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.events(job_id, "trainer.left"))
    await first.leave()
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [at(spec, 3)] and min(second.parts) == 4
    assert await cluster.events(job_id, "job.rewound") == []
    assert [event.data.step for event in await cluster.events(job_id, "checkpoint.saved")] == [3, 6]
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_trainer_whose_host_ends_before_it_has_saved_costs_what_it_did(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    first, _ = await cluster.trainer(), await cluster.replica()
    spec["schedule"]["save_every_steps"] = 2
    drains_in(first, 3)
    dying: list[asyncio.Task[None]] = []

    async def dies(request: Any) -> None:
        if request.path.endswith("step-3"):
            dying.append(asyncio.create_task(first.die()))
            await asyncio.sleep(60)

    first.faults["FinishSave"] = dies
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, dying), within_s=20)
    await dying[0]
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [at(spec, 2)]
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_trainer_that_drains_without_memory_for_a_checkpoint_ends_nothing_else(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    first, _ = await cluster.trainer(), await cluster.replica()
    drains_in(first, 3)

    async def full(_: object) -> None:
        raise OutOfMemory("rank 0 ran out of memory.")

    first.faults["Save"] = full
    job_id = await cluster.submit(spec)
    await until(lambda: cluster.events(job_id, "trainer.left"))
    await first.leave()
    second = await cluster.trainer()
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    assert second.configured == [""]
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_paused_job_is_saved_as_well(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, _ = await cluster.trainer(step_s=0.05), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    await asyncio.to_thread(cluster.coordinator.client.pause, job_id)
    paused = await until(lambda: cluster.job(job_id), lambda job: job.state is JobState.PAUSED)
    await first.coordinator.call(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=first.id))
    await until(lambda: cluster.events(job_id, "trainer.left"))
    assert (await cluster.job(job_id)).checkpoint == at(spec, paused.step)
    await first.leave()
    second = await cluster.trainer()
    await asyncio.to_thread(cluster.coordinator.client.resume, job_id)
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    assert second.configured == [at(spec, paused.step)]
    await trained_once(cluster, job_id, second)


@pytest.mark.parametrize(
    ("days", "kept"), [(None, [1, 2, 3, 4]), (2.0, [1, 3, 4]), (0.001, [1, 4]), (100.0, [1, 2, 3, 4])]
)
def test_old_checkpoints_are_removed_but_for_the_newest(
    days: float | None, kept: list[int], redis_url: str, tmp_path: Path
) -> None:
    async def play(store: Store) -> None:
        records = store.records(a_job().id)
        ages = {1: None, 2: 3.0, 3: 1.0, 4: 50.0}  # days; the first is of release 0.1
        for step, age in ages.items():
            path = tmp_path / f"step-{step}"
            path.mkdir()
            saved = {} if age is None else {"saved_s": time.time() - age * 86400}
            await records.add_checkpoint(step, {"path": str(path), **saved})
        run: Any = SimpleNamespace(
            job=a_job(),
            records=records,
            spec=SimpleNamespace(schedule=Schedule(keep_checkpoints=9, keep_checkpoints_days=days)),
        )
        await _prune(run)
        assert [*await records.checkpoints()] == kept

    with_store(redis_url, play)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}" for step in kept]
