"""What becomes of a job whose trainer has no memory left."""

import asyncio
from typing import Any

from millrace.errors import OutOfMemory, PartialOutOfMemory
from millrace.rest import JobState
from tests.services.coordinator.cluster import Cluster, scenario
from tests.services.coordinator.peers import SimulatedTrainer

TOLD = "rank 0 ran out of memory in the policy's update. It held: activations 60.0 GiB, weights 5.0 GiB."
FIX = "set trainer.activation_recompute: true (saves about 40.0 GiB)."


def limited(
    trainer: SimulatedTrainer, spec: dict[str, Any], tokens: int, from_step: int, forgets: bool = False
) -> list[int]:
    """From a step on the trainer has no memory for a larger token budget. Returns the budgets that it was asked for."""
    asked: list[int] = []

    async def limit(request: Any) -> None:
        asked.append(request.token_budget)
        if request.step < from_step or (request.token_budget or spec["trainer"]["token_budget"]) <= tokens:
            return
        if forgets:
            trainer.job_id = trainer.configuration = ""
            raise PartialOutOfMemory(TOLD, FIX)
        raise OutOfMemory(TOLD, FIX)

    trainer.faults["Step"] = limit
    return asked


@scenario
async def test_the_job_fails_with_what_held_the_memory(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    limited(trainer, spec, 128, from_step=2)
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step) == (JobState.FAILED, 1)
    assert TOLD in str(job.failure) and FIX in str(job.failure)


@scenario
async def test_the_step_is_made_again_with_half_the_budget_which_the_job_keeps(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    asked = limited(trainer, spec, 128, from_step=2)
    spec["trainer"]["on_out_of_memory"] = "halve_budget"
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step, job.failure) == (JobState.SUCCEEDED, 6, None)
    assert asked == [0, 0, 128, 128, 128, 128, 128]
    assert set(trainer.every.values()) == {1} and len(trainer.configured) == 1
    (told,) = await cluster.events(job.id, "trainer.out_of_memory")
    data = told.data.model_dump()
    assert (data["step"], data["token_budget_before"], data["token_budget"]) == (2, 256, 128)
    assert TOLD in told.message


@scenario
async def test_weights_that_were_given_up_come_from_the_last_checkpoint(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    limited(trainer, spec, 128, from_step=4, forgets=True)
    spec["trainer"]["on_out_of_memory"] = "halve_budget"
    spec["schedule"]["save_every_steps"] = 2
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step, job.failure) == (JobState.SUCCEEDED, 6, None)
    assert len(trainer.configured) == 2 and trainer.configured[1].endswith("step-2")
    assert len(await cluster.events(job.id, "trainer.out_of_memory")) == 1


@scenario
async def test_the_budget_never_falls_below_the_longest_sequence(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    asked = limited(trainer, spec, 0, from_step=2)
    spec["trainer"]["on_out_of_memory"] = "halve_budget"
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED and TOLD in str(job.failure)
    assert "The token budget of 7 cannot be lowered: the longest sequence has 7 tokens." in str(job.failure)
    assert asked[2:] == [128, 64, 32, 16, 8, 7]


@scenario
async def test_a_step_with_a_longer_sequence_has_a_budget_of_its_length(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, replica = await cluster.trainer(), await cluster.replica()
    asked: list[tuple[int, int, int]] = []

    async def limit(request: Any) -> None:
        longest = max(group.prompt_tokens + max(group.response_tokens) for group in request.groups)
        asked.append((request.step, request.token_budget, longest))
        if request.step == 2 and request.token_budget != 8:
            raise OutOfMemory(TOLD, FIX)
        if request.step > 2:
            replica.shape.tokens = 16

    trainer.faults["Step"] = limit
    spec["trainer"]["on_out_of_memory"] = "halve_budget"
    job = await cluster.ended(await cluster.submit(spec))
    assert (job.state, job.step, job.failure) == (JobState.SUCCEEDED, 6, None)
    later = [(budget, longest) for step, budget, longest in asked if step > 2]
    assert later == [(max(8, longest), longest) for _, longest in later]
    assert {(8, 7), (19, 19)} == set(later)


async def lowered_then_cancelled(cluster: Cluster, spec: dict[str, Any]) -> tuple[str, SimulatedTrainer]:
    """A job that was cancelled while its budget is 128 instead of 256."""
    trainer, _ = await cluster.trainer(step_s=0.2), await cluster.replica()
    limited(trainer, spec, 128, from_step=2)
    spec["trainer"]["on_out_of_memory"] = "halve_budget"
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 3)
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    await cluster.ended(job_id)
    return job_id, trainer


@scenario
async def test_a_job_that_is_resumed_with_another_budget_gets_it(cluster: Cluster, spec: dict[str, Any]) -> None:
    job_id, trainer = await lowered_then_cancelled(cluster, spec)
    asked = limited(trainer, spec, 512, from_step=1)
    await asyncio.to_thread(cluster.coordinator.client.resume, job_id, {"trainer": {"token_budget": 512}})
    job = await cluster.ended(job_id)
    assert (job.state, job.step) == (JobState.SUCCEEDED, 6) and set(asked) == {0}


@scenario
async def test_a_job_that_is_resumed_with_other_changes_keeps_the_lower_budget(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    job_id, trainer = await lowered_then_cancelled(cluster, spec)
    asked = limited(trainer, spec, 128, from_step=1)
    changes = {"schedule": {"steps": 7}, "trainer": {"optimizer": {"lr": 1e-5}}}
    await asyncio.to_thread(cluster.coordinator.client.resume, job_id, changes)
    job = await cluster.ended(job_id)
    assert (job.state, job.step) == (JobState.SUCCEEDED, 7) and set(asked) == {128}
