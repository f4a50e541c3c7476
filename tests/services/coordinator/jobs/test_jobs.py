"""Job states, their transitions, and the store that keeps to them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from millrace.contracts.v1 import fleet_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState, NotFound
from millrace.events import JobMoved
from millrace.ids import PromptId
from millrace.rest import JobState
from millrace.rest.fleet import DEFAULT_PARTITION
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.jobs.placing import Placing
from services.coordinator.state.job import ACTIVE, ENDED, TRANSITIONS, JobRecord, before
from services.coordinator.state.lease import DroppedPrompt
from services.coordinator.state.member import Patience
from services.coordinator.state.waiting import Preemption, Quota
from services.coordinator.store import Store
from services.coordinator.store.connection import text
from services.coordinator.store.index import Page
from tests.services.coordinator.redis import a_job, queued, registration, shared, with_store


def test_every_state_is_reached_and_every_job_can_end() -> None:
    assert set(TRANSITIONS) == set(JobState)
    reached, todo = set(), [JobState.QUEUED]
    while todo:
        state = todo.pop()
        reached.add(state)
        todo += TRANSITIONS[state] - reached
    assert reached == set(JobState)
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == ENDED
    for state in set(JobState) - ENDED:
        assert TRANSITIONS[state] >= {JobState.FAILED, JobState.CANCELLED}


def test_a_job_that_holds_the_trainer_is_neither_waiting_nor_over() -> None:
    assert {JobState.QUEUED} | ACTIVE | ENDED == set(JobState)
    assert JobState.QUEUED not in ACTIVE


def test_time_in_the_queue_and_time_of_running_are_counted_apart() -> None:
    job = replace(a_job(), created_s=100.0)
    assert job.clock(107.0) == {"queued_s": 7.0, "ran_s": 0.0, "since_s": 107.0}
    job = replace(job, state=JobState.RUNNING, **job.clock(107.0))
    job = replace(job, state=JobState.FAILED, **job.clock(110.0))
    job = replace(job, state=JobState.QUEUED, **job.clock(200.0))  # what ended is neither queued nor running
    job = replace(job, state=JobState.PAUSED, **job.clock(202.0))
    assert job.clock(203.0) == {"queued_s": 9.0, "ran_s": 4.0, "since_s": 203.0}


@pytest.mark.parametrize(("state", "to"), list(itertools.product(JobState, JobState)))
def test_the_store_moves_along_the_table_only(state: JobState, to: JobState, redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        job = a_job()
        await store.jobs.create(job)
        await store.jobs.update(job.id, state=state)
        if to in TRANSITIONS[state]:
            await store.jobs.move(job.id, to, "because", reward=0.5)
            moved = await store.jobs.get(job.id)
            assert (moved.state, moved.reward) == (to, 0.5)
            told = (await store.records(job.id).events())[-1]
            assert (told.kind, told.message, told.data) == ("job.state", "because", JobMoved(state=to))
            return
        with pytest.raises(InvalidState, match=f"{job.id} is {state}"):
            await store.jobs.move(job.id, to, "because", reward=0.5)
        assert (await store.jobs.get(job.id)).reward is None
        assert len(await store.records(job.id).events()) == 1

    assert (state in before(to)) is (to in TRANSITIONS[state])
    with_store(redis_url, scenario)


def test_a_move_whose_answer_was_lost_is_made_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        job, run = a_job(), store.connection.run
        await store.jobs.create(job)

        async def run_twice(*arguments: Any) -> Any:
            await run(*arguments)
            return await run(*arguments)

        monkeypatch.setattr(store.connection, "run", run_twice)
        await store.jobs.move(job.id, JobState.STARTING, "because")
        assert [event.message for event in await store.records(job.id).events()][1:] == ["because"]
        with pytest.raises(InvalidState, match=f"{job.id} is starting"):
            await store.jobs.move(job.id, JobState.STARTING, "another")

    with_store(redis_url, scenario)


def test_a_job_that_is_cancelled_while_it_is_taken_up_is_left_alone(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        job, everything = a_job(), store.index.queued
        await store.jobs.create(job)

        async def then_cancelled() -> list[JobRecord]:
            found = await everything()
            await store.jobs.move(job.id, JobState.CANCELLED, "meanwhile")
            return found

        store.index.queued = then_cancelled  # type: ignore[method-assign]
        fleet = Fleet(store, Patience())
        placing = Placing(shared(store, fleet), Quota(), Preemption())
        await fleet.register(registration(kind=fleet_pb2.MEMBER_KIND_TRAINER))
        assert await placing.next(placing.partitions[DEFAULT_PARTITION]) is None
        assert (await store.jobs.get(job.id)).state is JobState.CANCELLED

    with_store(redis_url, scenario)


@pytest.mark.parametrize("end", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_of_the_prompts_of_a_job_that_succeeded_only_the_counts_stay(end: JobState, redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        job = a_job()
        await store.jobs.create(job)
        await store.jobs.update(job.id, state=JobState.RUNNING)
        prompts = store.prompts(job.id)
        await prompts.issue([queued("0-0"), DroppedPrompt(PromptId("0-1"), Drop(DropReason.BAD_ROW, "1"))], 1, (0, 2))
        await prompts.close(1, DropReason.JOB_SUCCEEDED)
        view = await prompts.view()
        assert (view.issued, view.dropped, view.reasons) == (2, 2, {DropReason.BAD_ROW: 1, DropReason.JOB_SUCCEEDED: 1})
        await store.jobs.move(job.id, end, "over")
        assert await prompts.view() == view
        kept = {text(name).rpartition(":")[2] for name in await store.connection.do("KEYS", "*:train:*")}
        settled = set() if end is JobState.SUCCEEDED else {"state", "settled", "reason"}
        assert kept == {"counts", "reasons"} | settled

    with_store(redis_url, scenario)


def test_an_idempotency_key_stands_for_its_job_for_a_week(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        for _ in range(2):
            assert (await store.jobs.create(a_job(), "once"))[0] == a_job().id
        assert 0 < await store.connection.do("TTL", "millrace:idempotency:once") <= 7 * 24 * 3600

    with_store(redis_url, scenario)


def test_a_job_that_is_not_there(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(NotFound, match="there is no job job-x"):
            await store.jobs.get("job-x")
        with pytest.raises(NotFound, match="there is no job job-x"):
            await store.jobs.move("job-x", JobState.FAILED, "because")
        assert await store.index.page(1) == Page([], None, 0)

    with_store(redis_url, scenario)
