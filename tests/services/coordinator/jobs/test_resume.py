"""A job that failed or was cancelled is continued: it trains what it has left, and no prompt twice."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.drops import DropReason
from millrace.errors import InvalidJob, InvalidState, Unavailable
from millrace.rest import JobState, JobView
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.stages.test_checkpoint import at
from tests.services.coordinator.test_job import named
from tests.services.coordinator.test_recovery import restart, trained_once


async def failed(cluster: Cluster, spec: dict[str, Any], trainer: Any, after: int) -> JobView:
    """The job once it has failed after so many steps."""

    async def breaks(request: Any) -> None:
        if request.step == after + 1:
            del trainer.faults["Step"]
            raise InvalidState("the disk of the trainer is full.")

    trainer.faults["Step"] = breaks
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step) == (JobState.FAILED, after) and "disk" in str(job.failure)
    ledger = await cluster.ledger(job.id)
    assert ledger.issued == ledger.trained + ledger.dropped and ledger.reasons[DropReason.JOB_FAILED] > 0
    return job


async def finishes(cluster: Cluster, job_id: str, trainer: Any, changes: Mapping[str, Any] | None = None) -> JobView:
    """The job once it is resumed and has ended, all of its steps trained and nothing left of its first end."""
    resumed = await asyncio.to_thread(cluster.coordinator.client.resume, job_id, changes)
    assert resumed.state is JobState.QUEUED and resumed.failure is resumed.finished_s is resumed.report is None
    job = await asyncio.to_thread(cluster.coordinator.client.wait, job_id, 60.0)
    assert (job.state, job.step, job.failure) == (JobState.SUCCEEDED, 6, None)
    assert job.finished_s is not None and job.report is not None
    await trained_once(cluster, job_id, trainer)
    ledger = await cluster.ledger(job_id)
    assert (ledger.issued, ledger.dropped, ledger.reasons) == (24, 0, {})
    assert [row.step for row in cluster.coordinator.client.metrics(job_id)] == [1, 2, 3, 4, 5, 6]
    return job


@scenario
async def test_a_failed_job_goes_on_with_the_trainer_that_holds_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica(seconds=0.02)
    job = await failed(cluster, spec, trainer, after=3)
    await finishes(cluster, job.id, trainer)
    assert trainer.configured == [""] and set(trainer.every.values()) == {1}
    assert replica.publications.count(3) == 2, "what it held from before the end means nothing"
    events = [event async for event in told(cluster, job.id)]
    states = [event.data.state for event in events if event.kind == "job.state"]
    assert states == ["queued", "starting", "running", "failed", "queued", "starting", "running", "succeeded"]
    (again,) = [event.message for event in events if "queued again" in event.message]
    assert again.endswith("it continues after step 3, or from the model if the trainer does not hold that any more")


async def told(cluster: Cluster, job_id: str) -> Any:
    """All events as one follows them from the beginning."""
    for event in await asyncio.to_thread(lambda: list(cluster.coordinator.client.events(job_id))):
        yield event


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_an_ended_job_goes_on_from_its_checkpoint(end: str, shared: Any, spec: dict[str, Any]) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        spec["schedule"]["save_every_steps"] = 2
        first, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
        if end == "failed":
            job = await failed(cluster, spec, first, after=3)
        else:
            job_id = await cluster.submit(spec)
            await cluster.reached(job_id, 3)
            await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
            job = await cluster.ended(job_id)
        assert job.state == end and 3 <= job.step < 6
        saved = int(str(job.checkpoint)[-1])
        assert saved in (2, 4) and job.checkpoint == at(spec, saved)
        await first.die()
        second = await cluster.trainer()
        await finishes(cluster, job.id, second)
        assert second.configured == [at(spec, saved)]
        rewound = [event.data.version for event in await cluster.events(job.id, "job.rewound")]
        assert rewound == ([saved] if job.step > saved else [])

    played(shared, spec)


@scenario
async def test_a_trainer_that_let_go_of_the_job_goes_back_to_its_checkpoint(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    """As one does whose step was half made when it failed."""
    spec["schedule"]["save_every_steps"] = 2
    trainer, _ = await cluster.trainer(), await cluster.replica(seconds=0.02)
    job = await failed(cluster, spec, trainer, after=3)
    trainer.job_id, trainer.configuration, trainer.version, trainer.last = "", "", -1, None
    await finishes(cluster, job.id, trainer)
    assert trainer.configured == ["", at(spec, 2)]
    assert [event.data.version for event in await cluster.events(job.id, "job.rewound")] == [2]


@scenario
async def test_a_job_without_checkpoint_begins_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Another job had the trainer since."""
    trainer, _ = await cluster.trainer(), await cluster.replica()
    job = await failed(cluster, spec, trainer, after=2)
    other = await cluster.submit(named(spec, "other"))
    assert (await cluster.ended(other)).state is JobState.SUCCEEDED
    await finishes(cluster, job.id, trainer)
    assert trainer.configured == ["", "", ""]
    (rewound,) = await cluster.events(job.id, "job.rewound")
    assert (rewound.data.version, rewound.data.lost) == (0, 2)


@pytest.mark.parametrize("anew", [True, False])
def test_a_job_goes_on_with_changes(anew: bool, shared: Any, spec: dict[str, Any]) -> None:
    """Replicas are made ready again, and the trainer where it is concerned."""

    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        spec["schedule"]["save_every_steps"] = 2
        trainer, replica = await cluster.trainer(), await cluster.replica(seconds=0.02)
        job = await failed(cluster, spec, trainer, after=3)
        changes = {"trainer": {"token_budget": 4096}} if anew else {"deadlines": {"step_s": 99.0}}
        ended = await finishes(cluster, job.id, trainer, changes)
        assert trainer.configured == ["", at(spec, 2)] if anew else [""]
        assert replica.configured == [job.id, job.id]
        (group, fields) = next(iter(changes.items()))
        assert ended.spec[group] == job.spec[group] | fields != job.spec[group]
        assert {name: part for name, part in ended.spec.items() if name != group} == {
            name: part for name, part in job.spec.items() if name != group
        }

    played(shared, spec)


@scenario
async def test_changes_that_will_not_do_leave_the_job_as_it_was(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    client, job = cluster.coordinator.client, await failed(cluster, spec, trainer, after=1)
    for changes, told in [
        ({"data": {"files": ["/other.jsonl"]}}, r"data\.files: a job that is continued keeps it"),
        ({"trainer": {"token_budget": 4096, "seed": 3}}, r"trainer\.seed: a job that is continued keeps it"),
        ({"trainer": {"token_budget": -1}}, r"trainer\.token_budget"),
        ({"schedule": {"save_evry_steps": 3}}, r"schedule\.save_evry_steps"),
    ]:
        with pytest.raises(InvalidJob, match=told):
            await asyncio.to_thread(client.resume, job.id, changes)
    assert await cluster.job(job.id) == job
    await asyncio.to_thread(client.resume, job.id)
    await cluster.reached(job.id, 2)
    with pytest.raises(InvalidState, match="only a job that failed or was cancelled can be resumed with changes"):
        await asyncio.to_thread(client.resume, job.id, {"schedule": {"steps": 9}})
    await asyncio.to_thread(client.cancel, job.id)
    await cluster.ended(job.id)


def replaced(file: str, old: str, new: str) -> None:
    """Puts another file, with `new` for `old` in its text, in the place of `file`."""
    other = Path(f"{file}.other")
    other.write_text(Path(file).read_text().replace(old, new))
    other.replace(file)


@scenario
async def test_a_job_does_not_go_on_with_other_rows_in_the_same_file(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica(seconds=0.02)
    job = await failed(cluster, spec, trainer, after=3)
    (file,) = spec["data"]["files"]
    replaced(file, " + 1", " + 2")
    await asyncio.to_thread(cluster.coordinator.client.resume, job.id)
    refused = await cluster.ended(job.id)
    assert (refused.state, refused.step) == (JobState.FAILED, 3)
    assert f"data.files: the content of {file} is not that with which the job began." in str(refused.failure)
    assert "Fix: restore the files as they were" in str(refused.failure)
    replaced(file, " + 2", " + 1")
    await finishes(cluster, job.id, trainer)


@scenario
async def test_a_job_is_resumed_again_and_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Cancelled while it waits, killed with its coordinator as it starts, cancelled as it runs."""
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    client, job = cluster.coordinator.client, await failed(cluster, spec, trainer, after=1)
    await asyncio.to_thread(client.resume, job.id)
    await restart(cluster)
    await cluster.reached(job.id, 3)
    await asyncio.to_thread(client.cancel, job.id)
    assert (await cluster.ended(job.id)).state is JobState.CANCELLED
    await finishes(cluster, job.id, trainer)
    assert set(trainer.every.values()) == {1}
    with pytest.raises(InvalidState, match="succeeded and cannot be resumed"):
        await asyncio.to_thread(client.resume, job.id)


@scenario
async def test_a_resumed_job_may_lose_its_trainer_as_often_as_a_new_one(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    trainer.faults.once("Step", Unavailable("out of memory"), times=1000)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED
    trainer.faults.once("Step", Unavailable("out of memory"), times=2)
    await finishes(cluster, job.id, trainer)
    assert len(await cluster.events(job.id, "trainer.lost")) == 8


@scenario
async def test_an_evaluation_that_the_end_broke_off_is_made_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, slow = await cluster.trainer(), await cluster.replica(seconds=30.0)
    client, job_id = cluster.coordinator.client, await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, slow.held))
    await asyncio.to_thread(client.cancel, job_id)
    job = await cluster.ended(job_id)
    assert (job.state, job.step, job.evaluation_before) == (JobState.CANCELLED, 0, None)
    await slow.die()
    await cluster.replica()
    job = await finishes(cluster, job_id, trainer)
    assert job.evaluation_before is not None and job.evaluation_last is not None
