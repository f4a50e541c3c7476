"""A job of a higher priority interrupts one that runs: a checkpoint, the queue, and nothing is trained twice."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.drops import DropReason
from millrace.errors import InvalidState
from millrace.rest import JobState, JobView, WaitingFor
from tests.services.coordinator.cluster import Cluster, named, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import SimulatedTrainer
from tests.services.coordinator.test_recovery import trained_once


@pytest.fixture(scope="module")
def of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with running(tmp_path_factory.mktemp("coordinator"), "--preempt-after-s", "0.1") as process:
        yield process


def urgent(spec: dict[str, Any], **schedule: Any) -> dict[str, Any]:
    asked = {"priority": 5, "preempt": True, "steps": 2} | schedule
    return named(spec | {"schedule": {**spec["schedule"], **asked}}, "urgent")


async def gone_back(cluster: Cluster, job_id: str) -> JobView:
    """The job once it waits for the other one."""
    return await until(
        lambda: cluster.job(job_id), lambda job: job.state is JobState.QUEUED and job.waiting is not None
    )


async def went_on(cluster: Cluster, job_id: str, trainer: SimulatedTrainer, times: int = 1) -> None:
    """The job gave way so often, went on from its checkpoint each time, and trained every step and prompt once."""
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    await trained_once(cluster, job_id, trainer)
    assert (await cluster.ledger(job_id)).reasons == {}, "what was in flight was issued again"
    events = await cluster.events(job_id)
    assert [event.data.step for event in events if event.kind == "step.done"] == [1, 2, 3, 4, 5, 6]
    told = [event.message for event in events if "gives way to" in event.message]
    assert len(told) == times and not {event.kind for event in events} & {"job.rewound", "trainer.lost"}


@scenario
async def test_a_job_gives_way_after_its_step_and_goes_on_later(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(step_s=0.2), await cluster.replica(seconds=0.02)
    low = await cluster.submit(spec)
    await cluster.reached(low, 1)
    patient = await cluster.submit(urgent(spec, preempt=False, priority=3))
    await cluster.reached(low, 2)
    assert (await cluster.job(low)).state is JobState.RUNNING, "the other one waits"
    high = await cluster.submit(urgent(spec, steps=6) | {"output": spec["output"] + "-high"})
    job = await gone_back(cluster, low)
    assert job.waiting is not None and job.waiting.reason is WaitingFor.EARLIER_JOB
    assert job.waiting.message == f"it gave way after step {job.step}; its turn comes after {high} (urgent)"
    ledger = await cluster.ledger(low)
    assert (ledger.trained, ledger.queued, ledger.leased, ledger.generated) == (4 * job.step, 0, 0, 0)
    assert set(ledger.reasons) <= {DropReason.JOB_PREEMPTED} and ledger.issued == ledger.trained + ledger.dropped
    for job_id in (high, patient):
        assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    await went_on(cluster, low, trainer)
    assert [folder.rpartition("-")[2] for folder in trainer.configured] == ["", "", "", str(job.step)]
    assert (await cluster.job(low)).waiting is None


@scenario
async def test_a_job_that_gave_way_may_be_cancelled_in_the_queue(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(step_s=0.2), await cluster.replica(seconds=0.02)
    low = await cluster.submit(spec)
    await cluster.reached(low, 1)
    high = await cluster.submit(urgent(spec))
    job = await gone_back(cluster, low)
    await asyncio.to_thread(cluster.coordinator.client.cancel, low)
    ended, ledger = await cluster.ended(low), await cluster.ledger(low)
    assert (ended.state, ended.step) == (JobState.CANCELLED, job.step)
    assert (ledger.queued, ledger.leased, ledger.generated) == (0, 0, 0)
    assert ledger.issued == ledger.trained + ledger.dropped
    assert (await cluster.ended(high)).state is JobState.SUCCEEDED


@pytest.mark.parametrize("moment", ["Save", "SaveDone"])
def test_the_coordinator_is_killed_while_a_job_gives_way(
    moment: str, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        trainer, _ = await cluster.trainer(step_s=0.2), await cluster.replica(seconds=0.02)
        low, killed = await cluster.submit(spec), asyncio.Event()
        await cluster.reached(low, 1)

        async def kill(_: object) -> None:
            if not killed.is_set():
                killed.set()
                cluster.coordinator.kill()

        trainer.faults[moment] = kill
        high = await cluster.submit(urgent(spec))
        await asyncio.wait_for(killed.wait(), 60)
        await asyncio.to_thread(cluster.coordinator.start)
        assert (await cluster.ended(high)).state is JobState.SUCCEEDED
        await went_on(cluster, low, trainer)

    played(shared, spec)


@scenario
async def test_a_job_that_cannot_be_saved_goes_on(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It gives way after the step that can be saved."""
    trainer, _ = await cluster.trainer(step_s=0.2), await cluster.replica(seconds=0.02)
    low = await cluster.submit(spec)
    await cluster.reached(low, 1)
    trainer.faults.once("FinishSave", InvalidState("No space left on device."))
    high = await cluster.submit(urgent(spec))
    assert (await cluster.ended(high)).state is JobState.SUCCEEDED
    assert len(await cluster.events(low, "checkpoint.failed")) == 1
    await went_on(cluster, low, trainer)
