"""Things are killed in the middle of a job; nothing is trained twice and nothing is lost."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.client import Client
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidState, PublicationFailed, Unavailable
from millrace.events import EventKind
from millrace.rest import JobState, WaitingFor
from services.coordinator.redis_server import RedisServer
from services.coordinator.state.faults import TRAINER_BUDGET
from services.coordinator.store.connection import Connection
from tests.services.coordinator.cluster import Cluster, scenario, until
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.coordinator.peers import SimulatedTrainer


async def restart(cluster: Cluster) -> None:
    cluster.coordinator.kill()
    await asyncio.to_thread(cluster.coordinator.start)


async def trained_once(cluster: Cluster, job_id: str, trainer: Any, steps: int = 6) -> None:
    """In the lineage that counts every prompt was trained once, and the ledger adds up."""
    assert sorted(trainer.trained) == list(range(1, steps + 1))
    prompts = [prompt for batch in trainer.trained.values() for prompt in batch]
    assert len(prompts) == len(set(prompts)) == steps * 4
    ledger = await cluster.ledger(job_id)
    assert (ledger.queued, ledger.leased, ledger.generated) == (0, 0, 0)
    assert ledger.issued == ledger.trained + ledger.dropped and ledger.trained == steps * 4


@scenario
async def test_the_coordinator_is_killed_again_and_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.05)
    job_id = await cluster.submit(spec)
    for step in (1, 3, 5):
        await cluster.reached(job_id, step)
        await restart(cluster)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert set(trainer.every.values()) == {1}
    await trained_once(cluster, job_id, trainer)


@pytest.mark.parametrize("moment", ["Step", "StepDone", "TransferPublication", "FinishPublication", "Save", "SaveDone"])
def test_the_coordinator_is_killed_while_the_trainer_works(
    moment: str, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        trainer, _ = await cluster.trainer(), await cluster.replica()
        spec["schedule"]["save_every_steps"] = 2
        killed = asyncio.Event()

        async def kill(request: Any) -> None:
            if trainer.version >= 2 and not killed.is_set():
                killed.set()
                cluster.coordinator.kill()

        trainer.faults[moment] = kill
        job_id = await cluster.submit(spec)
        await asyncio.wait_for(killed.wait(), 60)
        await asyncio.to_thread(cluster.coordinator.start)
        job = await cluster.ended(job_id)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert set(trainer.every.values()) == {1}
        await trained_once(cluster, job_id, trainer)

    played(shared, spec)


@scenario
async def test_the_trainer_is_replaced_and_goes_on_from_the_checkpoint(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["schedule"]["save_every_steps"] = 2
    first, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 3)
    await first.die()
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured[0].endswith(("step-2", "step-4"))
    await trained_once(cluster, job_id, second)
    rewound = await cluster.events(job_id, "job.rewound")
    assert [event.data.version for event in rewound] in ([], [2], [4])
    assert [row.step for row in cluster.coordinator.client.metrics(job_id)] == [1, 2, 3, 4, 5, 6]


@scenario
async def test_replicas_generate_while_there_is_no_trainer(cluster: Cluster, spec: dict[str, Any]) -> None:
    """As many groups as the staleness bound allows, which the next trainer is given: none is generated again."""
    spec["schedule"] |= {"save_every_steps": 1, "save_in_background": False, "steps": 6, "max_staleness": 1}
    spec.pop("evaluation")
    first, replica = await cluster.trainer(), await cluster.replica()
    trained, release = asyncio.Event(), asyncio.Event()

    async def dies(request: Any) -> None:
        if request.step == 3:
            trained.set()
            await asyncio.sleep(600)

    async def waits(_: Any) -> None:
        if trained.is_set():
            await asyncio.wait_for(release.wait(), 120)

    first.faults["Step"], replica.faults["Generate"] = dies, waits
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(trained.wait(), 60)
    await first.die()
    await until(lambda: cluster.events(job_id, "trainer.lost"))
    release.set()
    ledger = await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.generated == 2 * 4)
    assert (ledger.trained, ledger.queued, ledger.leased) == (2 * 4, 0, 0)
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured[0].endswith("step-2") and second.stalest <= 1
    assert len(replica.leased) == len(set(replica.leased)) == 6 * 4, "no prompt is generated twice"
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_trainer_that_dies_while_groups_are_waited_for_is_told_at_once(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    spec.pop("evaluation")
    first, replica = await cluster.trainer(), await cluster.replica()
    asked, release = asyncio.Event(), asyncio.Event()

    async def waits(_: Any) -> None:
        asked.set()
        await asyncio.wait_for(release.wait(), 120)

    replica.faults["Generate"] = waits
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(asked.wait(), 60)
    await first.die()
    await until(lambda: cluster.events(job_id, "trainer.lost"))
    job = await until(lambda: cluster.job(job_id), lambda job: job.waiting is not None)
    assert job.waiting is not None and job.waiting.reason is WaitingFor.TRAINER
    release.set()
    second = await cluster.trainer()
    assert (await cluster.ended(job_id)).state is JobState.SUCCEEDED
    await trained_once(cluster, job_id, second)


@scenario
async def test_complete_groups_of_versions_up_to_the_checkpoint_stay(cluster: Cluster, spec: dict[str, Any]) -> None:
    """The job goes from version 3 back to 2. Of the eight complete groups three are of version 2 and stay; four are of
    the version 3 that is gone, and one has tokens of both."""
    spec["schedule"] |= {"save_every_steps": 2, "save_in_background": False, "steps": 6, "max_staleness": 1}
    spec["data"]["shuffle"] = False
    spec.pop("evaluation")
    first, replica = await cluster.trainer(), await cluster.replica()
    stuck, sampled_by = asyncio.Event(), dict[str, list[int]]()
    slow, group = "0-15", replica.group

    async def steps(request: Any) -> None:
        if request.step == 3:  # until all of version 2 are complete but the slow one
            await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.generated == 7)
        if request.step == 4:
            stuck.set()
            await asyncio.sleep(600)

    async def waits(lease: Any) -> None:
        if lease.prompt_id == slow and slow not in sampled_by:
            await until(lambda: asyncio.sleep(0, replica.version == 3))

    def made(lease: Any) -> Any:
        """`sampled_by`: the publication after which each prompt's newest tokens were sampled, counted from 0."""
        sampled_by.setdefault(lease.prompt_id, []).append(len(replica.publications) - 1)
        answer = group(lease)
        if lease.prompt_id == slow and len(sampled_by[slow]) == 1:
            for trajectory in answer.trajectories:
                trajectory.versions[0].version, trajectory.versions[0].end = 2, 2
                trajectory.versions.add(version=3, start=2, end=4)
        return answer

    first.faults["Step"], replica.faults["Generate"], replica.group = steps, waits, made
    job_id = await cluster.submit(spec)
    await asyncio.wait_for(stuck.wait(), 60)
    before = await until(lambda: cluster.ledger(job_id), lambda ledger: ledger.generated == 2 * 4)
    await first.die()
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure, before.issued) == (JobState.SUCCEEDED, None, 5 * 4)
    (rewound,) = await cluster.events(job_id, "job.rewound")
    assert (rewound.data.version, rewound.data.lost) == (2, 3) and replica.publications == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert (rewound.data.kept, rewound.data.discarded, rewound.data.prompts) == (3, 5, 4 + 5)
    assert "3 stay, 5 have tokens of later versions" in rewound.message
    kept, lost = ["0-12", "0-13", "0-14"], 3
    assert set(kept) <= set(second.trained[3]) and all(replica.leased.count(prompt) == 1 for prompt in kept)
    assert sum(len(each) > 1 for each in sampled_by.values()) == 4 + 5, "all others are generated once"
    assert all(sampled_by[prompt][-1] != lost for batch in second.trained.values() for prompt in batch)
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_job_without_trainer_is_cancelled_at_once(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Then its replicas get no leases any more."""
    first, replica = await cluster.trainer(step_s=0.2), await cluster.replica(seconds=0.05)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    await first.die()
    await until(lambda: cluster.events(job_id, "trainer.lost"))
    await asyncio.to_thread(cluster.coordinator.client.cancel, job_id)
    assert (await cluster.ended(job_id)).state is JobState.CANCELLED
    leased = len(replica.leased)
    ledger = await cluster.ledger(job_id)
    assert (ledger.queued, ledger.leased, ledger.generated) == (0, 0, 0)
    await until(lambda: asyncio.sleep(0, not replica.held))
    assert len(replica.leased) == leased


@scenario
async def test_a_trainer_without_checkpoint_begins_again(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, replica = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 3)
    await first.die()
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [""] and replica.publications.count(0) == 2
    assert second.stalest <= 1
    await trained_once(cluster, job_id, second)
    (rewound,) = await cluster.events(job_id, "job.rewound")
    assert rewound.data.version == 0 and rewound.data.prompts >= 12


@scenario
async def test_going_back_that_a_crash_broke_off_is_finished(cluster: Cluster, spec: dict[str, Any]) -> None:
    """The replicas take the versions of the new past, though they are lower than those that they hold."""
    trainer, replica = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 3)
    cluster.coordinator.kill()
    redis = Connection(RedisServer(cluster.coordinator.folder / "redis").url)
    await redis.run("rewind", [f"millrace:job:{job_id}:train", f"millrace:job:{job_id}"], [0])
    await redis.run("undo", [f"millrace:job:{job_id}:train"], [2])
    await redis.close()
    await asyncio.to_thread(cluster.coordinator.start)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert trainer.configured == ["", ""] and replica.publications.count(0) == 2
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_a_trainer_that_stands_by_takes_the_seat_when_it_is_free(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["schedule"]["save_every_steps"] = 1
    first, _ = await cluster.trainer(step_s=0.1), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    second = await cluster.trainer()
    await cluster.reached(job_id, 3)
    assert len(second.configured) == 1 and await cluster.events(job_id, "job.rewound") == []
    await first.die()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert len(second.configured) == 1, "it goes on from what it holds"
    await trained_once(cluster, job_id, second)


async def holds(trainer: SimulatedTrainer, least: int) -> None:
    await until(lambda: asyncio.sleep(0, trainer.version), lambda version: version >= least)


async def dies(trainer: SimulatedTrainer, dying: list[asyncio.Task[None]]) -> None:
    """In the middle of a call."""
    dying.append(asyncio.create_task(trainer.die()))
    await asyncio.sleep(60)


def dies_in_step_4(first: SimulatedTrainer, second: SimulatedTrainer) -> None:
    """`first` dies as soon as `second` holds version 3."""
    dying: list[asyncio.Task[None]] = []

    async def step(request: Any) -> None:
        if request.step == 4:
            await holds(second, 3)
            await dies(first, dying)

    first.faults["Step"] = step


@scenario
async def test_a_trainer_that_stands_by_goes_on_with_the_step_that_was_under_way(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    """Nothing is trained or generated again, without any checkpoint: each state is sent from memory to memory."""
    first, second, _ = await cluster.trainer(), await cluster.trainer(), await cluster.replica()
    dies_in_step_4(first, second)
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert await cluster.events(job_id, "job.rewound") == []
    assert [e.data.member for e in await cluster.events(job_id, "trainer.configured") if e.data.stood_by] == [second.id]
    assert second.configured == [""] and set((first.every + second.every).values()) == {1}
    assert second.received[-1] == 3 and first.saving == {}
    await trained_once(cluster, job_id, second)
    assert not (Path(spec["output"]) / "standby").exists()


@scenario
async def test_no_copy_waits_for_another_trainer_that_loads_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, second, third = await cluster.trainer(), await cluster.trainer(), await cluster.trainer()
    ended = asyncio.Event()

    async def loads(_: Any) -> None:
        await ended.wait()

    async def step(request: Any) -> None:
        await holds(second, request.step - 1)

    third.faults["Configure"], first.faults["Step"] = loads, step
    await cluster.replica()
    job = await cluster.ended(await cluster.submit(spec))
    ended.set()
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert len(second.received) >= 3 and third.received == [] and first.saving.keys() <= {job.checkpoint}


@scenario
async def test_one_that_a_copy_does_not_reach_gets_it_over_the_disk(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, second, _ = await cluster.trainer(), await cluster.trainer(), await cluster.replica()

    async def lost(request: Any) -> None:
        raise PublicationFailed("the connection was closed")

    dies_in_step_4(first, second)
    second.faults["ReceiveState"] = lost
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert await cluster.events(job_id, "job.rewound") == [] and second.configured == [""]
    assert [path for path in first.saved if path.endswith("-step-3")] and second.received == []
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_copy_that_was_not_written_whole_leaves_the_one_before(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Over the disk, to a trainer with another number of ranks."""
    first, second, _ = await cluster.trainer(), await cluster.trainer(ranks=2), await cluster.replica()
    dying: list[asyncio.Task[None]] = []

    async def finish(request: Any) -> None:
        if request.path.endswith("step-3"):
            await dies(first, dying)

    async def step(request: Any) -> None:
        await holds(second, min(request.step - 1, 2))

    first.faults["FinishSave"], first.faults["Step"] = finish, step
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert [event.data.version for event in await cluster.events(job_id, "job.rewound")] == [2]
    assert second.configured == [""]
    await trained_once(cluster, job_id, second)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_trainer_that_gets_the_seat_loads_what_is_newer(
    damaged: bool, shared: CoordinatorProcess, spec: dict[str, Any]
) -> None:
    """The checkpoint of the last step, which it does not hold. Where that cannot be read, it loads the job anew."""

    @scenario
    async def played(cluster: Cluster, spec: dict[str, Any]) -> None:
        first, second, _ = await cluster.trainer(), await cluster.trainer(ranks=2), await cluster.replica()
        spec["schedule"]["save_every_steps"] = 4
        dying: list[asyncio.Task[None]] = []

        async def load(_: Any) -> None:
            if damaged or not dying:
                raise InvalidState("the file is damaged")

        async def step(request: Any) -> None:
            if request.step == 1:
                await holds(second, 0)
            if request.step == 5:
                await until(lambda: cluster.job(job_id), lambda job: (job.checkpoint or "").endswith("step-4"))
                await dies(first, dying)

        first.faults["Step"], second.faults["Load"] = step, load
        job_id = await cluster.submit(spec)
        job = await cluster.ended(job_id)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert await cluster.events(job_id, "job.rewound") == []
        assert second.configured == ["", *[f"{spec['output']}/checkpoints/step-4"] * damaged]
        assert [e.data.stood_by for e in await cluster.events(job_id, "trainer.configured")] == [False, not damaged]
        await trained_once(cluster, job_id, second)

    played(shared, spec)


@scenario
async def test_a_trainer_that_stood_by_in_another_past_is_not_believed(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It is cut off with version 3, and comes back when the job has begun again without it."""
    first, second, _ = await cluster.trainer(), await cluster.trainer(), await cluster.replica()
    dying: list[asyncio.Task[None]] = []

    async def both_die(request: Any) -> None:
        if request.step == 4:
            await holds(second, 3)
            dying.append(asyncio.create_task(second.die()))
            await dies(first, dying)

    async def dies_later(request: Any) -> None:
        if request.step == 5:
            await until(lambda: asyncio.sleep(0, len(second.configured) == 2))
            await holds(second, 4)
            await dies(third, dying)

    first.faults["Step"] = both_die
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, len(dying) == 2))
    third = await cluster.trainer()
    third.faults["Step"] = dies_later
    await holds(third, 2)
    assert (second.version, second.configured) == (3, [""])
    await second.come_back()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert len(second.configured) == 2
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_trainer_stands_by_across_a_restart_of_the_coordinator(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, second, _ = await cluster.trainer(step_s=0.1), await cluster.trainer(), await cluster.replica()
    dies_in_step_4(first, second)
    job_id = await cluster.submit(spec)
    await holds(second, 1)
    cluster.coordinator.kill()
    await asyncio.to_thread(cluster.coordinator.start)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [""] and await cluster.events(job_id, "job.rewound") == []
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_trainer_that_is_drained_leaves_the_job_to_the_one_that_stands_by(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    """Also in the middle of a step: the other one is never asked for what it does not hold."""
    spec["schedule"]["save_every_steps"] = 1
    first, _ = await cluster.trainer(step_s=0.3), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 1)
    second = await cluster.trainer()

    async def drains(_: object) -> None:
        await first.coordinator.call(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=first.id))

    first.faults["Step"] = drains
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert await cluster.events(job_id, "publication.failed") == []
    await trained_once(cluster, job_id, second)
    await first.leave()
    assert [event.data.member for event in await cluster.events(job_id, "trainer.left")] == [first.id]
    await none_died(cluster, job_id, first)


async def none_died(cluster: Cluster, job_id: str, *left: SimulatedTrainer) -> None:
    """The trainers have left, and are charged to nobody."""
    fleet = await asyncio.to_thread(cluster.coordinator.client.fleet)
    assert [m.state for m in fleet.trainers if m.id in {one.id for one in left}] == ["left"] * len(left)
    events = await cluster.events(job_id)
    assert {event.kind for event in events} & {EventKind.MEMBER_DIED, EventKind.TRAINER_LOST} == set()


@scenario
async def test_trainers_may_be_drained_as_often_as_one_likes(cluster: Cluster, spec: dict[str, Any]) -> None:
    """More of them in one step than may be lost there. Each has left before its call is answered."""
    job_id, left, _ = await cluster.submit(spec), list[SimulatedTrainer](), await cluster.replica()
    for _ in range(TRAINER_BUDGET + 2):
        trainer, told = await cluster.trainer(), asyncio.Event()

        async def drains(_: object, trainer: SimulatedTrainer = trainer, told: asyncio.Event = told) -> None:
            await trainer.coordinator.call(FleetRpc.Drain, fleet_pb2.DrainRequest(member_id=trainer.id))
            told.set()
            raise Unavailable("Step cannot begin: the trainer is draining.")

        trainer.faults["Step"] = drains
        await asyncio.wait_for(told.wait(), 30)
        await trainer.leave()
        left.append(trainer)
    last = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert len(await cluster.events(job_id, "trainer.left")) == TRAINER_BUDGET + 2
    await none_died(cluster, job_id, *left)
    await trained_once(cluster, job_id, last)


@scenario
async def test_a_trainer_that_comes_back_with_another_past_is_not_believed(
    cluster: Cluster, spec: dict[str, Any]
) -> None:
    """It made a step after the checkpoint from which the job went on elsewhere, and has the seat again while that step
    is being made with other prompts."""
    spec["schedule"]["save_every_steps"] = 2
    first, _ = await cluster.trainer(step_s=0.2), await cluster.replica()
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 5)
    await first.die()
    stepping = asyncio.Event()

    async def stands_still(_: object) -> None:
        stepping.set()
        await asyncio.sleep(60)

    second = await cluster.trainer()
    second.faults["Step"] = stands_still
    await asyncio.wait_for(stepping.wait(), 30)
    assert (first.version, second.version) == (5, 4)
    await first.come_back()
    await second.die()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert len(first.configured) == 2 and first.configured[1].endswith("step-4")
    await trained_once(cluster, job_id, first)


@scenario
async def test_a_trainer_that_always_dies_at_a_step_fails_the_job(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, _ = await cluster.trainer(), await cluster.replica()
    trainer.faults.once("Step", Unavailable("out of memory"), times=1000)
    job = await cluster.ended(await cluster.submit(spec))
    assert job.state is JobState.FAILED
    assert "the trainer was lost 6 times at step 1: out of memory" in str(job.failure)


def redis_process(cluster: Cluster) -> psutil.Process:
    """The embedded redis-server."""
    assert cluster.coordinator.process is not None
    found = [p for p in psutil.Process(cluster.coordinator.process.pid).children() if "redis" in p.name()]
    assert len(found) == 1
    return found[0]


@scenario
async def test_the_embedded_redis_is_killed(cluster: Cluster, spec: dict[str, Any]) -> None:
    """Where the disk is slow, Redis forgets what it answered in its last two seconds (`appendfsync everysec`). The job
    then goes on from the last step that Redis knows: a prompt may be trained again, but not twice in that lineage."""
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    for step in (2, 4):
        await cluster.reached(job_id, step)
        redis_process(cluster).kill()
        await asyncio.sleep(0.2)
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_redis_stands_still_for_a_while(cluster: Cluster, spec: dict[str, Any]) -> None:
    """A stopped redis-server takes connections and answers nothing; REST says so and the job goes on afterwards."""
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    pid = redis_process(cluster).pid
    impatient = Client(cluster.coordinator.client.url, token="", patience_s=0.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not await asyncio.to_thread(impatient.ready)
        with pytest.raises(Unavailable, match=r"Redis at unix:.* does not answer"):
            await asyncio.to_thread(impatient.job, job_id)
    finally:
        os.kill(pid, signal.SIGCONT)
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_redis_is_full_for_a_while(cluster: Cluster, spec: dict[str, Any]) -> None:
    """It answers and takes nothing: the job waits, and goes on once there is room."""
    trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.02)
    job_id = await cluster.submit(spec)
    await cluster.reached(job_id, 2)
    redis = Connection(RedisServer(cluster.coordinator.folder / "redis").url)
    await redis.do("CONFIG", "SET", "maxmemory", "1")
    try:
        await until(lambda: asyncio.to_thread(cluster.coordinator.client.ready), lambda ready: not ready)
        assert (await cluster.job(job_id)).state is JobState.RUNNING
    finally:
        await redis.do("CONFIG", "SET", "maxmemory", "0")
        await redis.close()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert set(trainer.every.values()) == {1}
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_a_replica_dies_while_it_generates(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["rollout"]["lease_s"] = 60.0
    trainer = await cluster.trainer()
    doomed = await cluster.replica(seconds=30.0)
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, doomed.held))
    await doomed.die()
    survivor = await cluster.replica()
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and set(doomed.leased) <= set(survivor.leased)
    await trained_once(cluster, job_id, trainer)
    (out,) = await cluster.events(job_id, "member.out")
    assert out.data.member == doomed.id
    fleet = cluster.coordinator.client.fleet()
    states = {member.id: member.state for member in fleet.replicas}
    assert (states[doomed.id], states[survivor.id]) == ("lost", "serving")


@scenario
async def test_the_trainer_and_the_only_replica_die_at_once(cluster: Cluster, spec: dict[str, Any]) -> None:
    first, doomed = await cluster.trainer(), await cluster.replica(seconds=30.0)
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, doomed.held))
    await asyncio.gather(first.die(), doomed.die())
    await cluster.replica()
    second = await cluster.trainer()
    job = await cluster.ended(job_id)
    assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
    assert second.configured == [""]
    await trained_once(cluster, job_id, second)


@scenario
async def test_a_replica_is_drained_and_finishes_what_it_holds(cluster: Cluster, spec: dict[str, Any]) -> None:
    trainer, drained = await cluster.trainer(), await cluster.replica(seconds=0.3)
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, drained.held))
    import httpx

    url = f"http://127.0.0.1:{cluster.coordinator.http_port}/v1/fleet/{drained.id}/drain"
    answer = await asyncio.to_thread(lambda: httpx.post(url, trust_env=False))
    assert answer.json()["state"] == "draining"
    await until(lambda: asyncio.sleep(0, not drained.held))
    leased = len(drained.leased)
    await cluster.replica()
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and len(drained.leased) == leased and drained.fenced == 0
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_a_lease_expires_and_its_late_answer_is_refused(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["rollout"]["lease_s"] = 0.5
    trainer, slow = await cluster.trainer(), await cluster.replica(seconds=3.0)
    slow.extending = False
    job_id = await cluster.submit(spec)
    await until(lambda: asyncio.sleep(0, slow.held))
    slow.shape.capacity = 0
    await cluster.replica()
    await cluster.reached(job_id, 1)
    await until(lambda: asyncio.sleep(0, slow.fenced))
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and await cluster.events(job_id, "lease.expired")
    await trained_once(cluster, job_id, trainer)


@scenario
async def test_a_lease_that_is_extended_does_not_expire(cluster: Cluster, spec: dict[str, Any]) -> None:
    spec["rollout"]["lease_s"] = 5.0
    spec["schedule"]["steps"] = 1
    trainer, slow = await cluster.trainer(), await cluster.replica(seconds=6.0)
    spec.pop("evaluation")
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert job.state is JobState.SUCCEEDED and slow.fenced == 0
    assert await cluster.events(job_id, "lease.expired") == []
    await trained_once(cluster, job_id, trainer, steps=1)
