"""Job states, their transitions, and the store that keeps to them."""

import itertools

import pytest

from millrace.errors import InvalidState, NotFound
from millrace.rest import JobState
from services.coordinator.jobs import ACTIVE, ENDED, TRANSITIONS, before
from services.coordinator.store import Store
from tests.services.coordinator.redis import a_job, with_store


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
            assert (told.kind, told.message, told.data) == ("job.state", "because", {"state": to})
            return
        with pytest.raises(InvalidState, match=f"{job.id} is {state}"):
            await store.jobs.move(job.id, to, "because", reward=0.5)
        assert (await store.jobs.get(job.id)).reward is None
        assert len(await store.records(job.id).events()) == 1

    assert (state in before(to)) is (to in TRANSITIONS[state])
    with_store(redis_url, scenario)


def test_a_job_that_is_not_there(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(NotFound, match="there is no job job-x"):
            await store.jobs.get("job-x")
        with pytest.raises(NotFound, match="there is no job job-x"):
            await store.jobs.move("job-x", JobState.FAILED, "because")
        assert await store.jobs.all() == []

    with_store(redis_url, scenario)


def test_jobs_are_listed_in_the_order_of_their_submission(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        for number in (3, 1, 2):
            await store.jobs.create(a_job(number))
        assert [job.id for job in await store.jobs.all()] == [a_job(n).id for n in (1, 2, 3)]

    with_store(redis_url, scenario)
