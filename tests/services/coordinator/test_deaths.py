"""Members die at the work of a job, again and again: a budget ends the job, or drops the prompt, and nothing else."""

import asyncio
from typing import Any

from millrace.contracts.v1 import fleet_pb2
from millrace.errors import MillraceError, Unavailable
from millrace.rest import JobState
from services.coordinator.state.faults import PLACE_BUDGET, PROMPT_BUDGET, TRAINER_BUDGET, Deaths, place_of
from tests.services.coordinator.cluster import Cluster, named, scenario, until
from tests.services.coordinator.peers import Shape, SimulatedReplica, SimulatedTrainer

WORDS = "IndexError: index out of range in self"


def previous(member: Any) -> fleet_pb2.PreviousLife:
    return fleet_pb2.PreviousLife(member_id=member.id, ended="was ended by SIGSEGV", last_words=WORDS)


class Place:
    """A host whose replica is started again, at the same address, whenever it dies."""

    def __init__(self, cluster: Cluster, kills: Any) -> None:
        """`kills`: whether a replica dies that holds a lease of this prompt."""
        self.cluster, self.kills = cluster, kills
        self.lives = 0

    async def keep(self) -> None:
        last: SimulatedReplica | None = None
        while True:
            replica = SimulatedReplica(self.cluster.coordinator.address, Shape(seconds=0.3))
            if last is not None:
                replica.port, replica.previous = last.server.port, previous(last)
            await replica.start()
            self.lives += 1
            self.cluster.members.append(replica)
            await until(lambda: asyncio.sleep(0, [p for p in replica.leased[:] if self.kills(p)]))  # noqa: B023
            self.cluster.members.remove(replica)
            await replica.die()
            last = replica


async def poisoned(cluster: Cluster, spec: dict[str, Any], kills: Any) -> tuple[str, Place]:
    await cluster.trainer()
    place = Place(cluster, kills)
    keeping = asyncio.create_task(place.keep())
    try:
        job_id = await cluster.submit(spec)
        await cluster.ended(job_id)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    return job_id, place


@scenario
async def test_a_job_that_kills_every_replica_fails_with_their_last_words(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    spec.pop("evaluation")
    job_id, place = await poisoned(cluster, spec, lambda prompt: True)
    job = await cluster.job(job_id)
    assert job.state is JobState.FAILED
    assert f"failed {PLACE_BUDGET} times in a row" in str(job.failure) and WORDS in str(job.failure)
    assert place.lives <= PLACE_BUDGET + 1
    deaths = await cluster.events(job_id, "member.died")
    assert [event.data.deaths for event in deaths] == [1, 2, 3]
    await cluster.replica()
    other = await cluster.submit(named(spec, "after"))
    assert (await cluster.ended(other)).state is JobState.SUCCEEDED
    assert await cluster.events(other, "member.died") == []


@scenario
async def test_one_prompt_that_kills_is_dropped_and_the_job_goes_on(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec.pop("evaluation")
    spec["data"]["shuffle"] = False
    job_id, place = await poisoned(cluster, spec, lambda prompt: prompt == "0-2")
    job = await cluster.job(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    ledger = await cluster.ledger(job_id)
    assert ledger.reasons["killed_replicas"] == 1 and ledger.trained == 24
    assert place.lives == PROMPT_BUDGET + 1
    (dropped,) = await cluster.events(job_id, "prompt.dropped")
    assert dropped.data.prompt == "0-2" and "was ended by SIGSEGV" in dropped.message


@scenario
async def test_a_model_that_no_engine_starts_on_fails_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer()
    replica = await cluster.replica()
    replica.faults.once("Configure", MillraceError("the engine died: unknown rope type."), times=99)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED and "the engine died: unknown rope type" in str(job.failure)


@scenario
async def test_a_job_that_kills_the_trainer_fails_with_its_last_words(cluster: Cluster, spec: dict[str, Any]) -> None:
    """The coordinator is killed in between: what was counted is not lost."""
    await cluster.replica()
    lives: list[SimulatedTrainer] = []

    async def keep() -> None:
        while True:
            trainer, stepping = SimulatedTrainer(cluster.coordinator.address), asyncio.Event()

            async def step(_: object) -> None:
                stepping.set()  # noqa: B023
                await asyncio.sleep(60)

            trainer.faults["Step"] = step
            if lives:
                trainer.port, trainer.previous = lives[-1].server.port, previous(lives[-1])
            await joined(trainer)
            lives.append(trainer)
            await stepping.wait()
            await trainer.die()
            if len(lives) == 3:
                cluster.coordinator.kill()
                await asyncio.to_thread(cluster.coordinator.start)

    keeping = asyncio.create_task(keep())
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id, 90)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await lives[-1].leave()
    assert job.state is JobState.FAILED and f"the trainer was lost {TRAINER_BUDGET + 1} times at step 1" in job.failure
    assert WORDS in job.failure and "check that it runs" not in job.failure
    assert len(lives) <= TRAINER_BUDGET + 3  # one death nobody counted: the coordinator was killed in that moment


async def joined(trainer: SimulatedTrainer) -> None:
    """It is patient, as a member is: the coordinator may just be starting."""
    while True:
        try:
            return await trainer.start()
        except Unavailable:
            await trainer.server.stop(0)
            await asyncio.sleep(0.2)


def test_a_budget_is_spent_only_where_nobody_else_may_do_the_work() -> None:
    bad, good = place_of("rollout", "a:1"), place_of("rollout", "b:1")
    assert Deaths({bad: 2}).spent([bad]) == 0
    assert Deaths({bad: 3}).spent([]) == Deaths({bad: 3}).spent([bad]) == 3
    assert Deaths({bad: 9}).spent([bad, good]) == 0, "the other host has not failed: this one's engine may be broken"
    assert Deaths({bad: 9, good: 3}).spent([bad, good]) == 9
    assert Deaths({place_of("judge", "a:1"): 3}).of_pool("rollout").spent([]) == 0
