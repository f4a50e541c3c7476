"""The index of jobs: pages, states, output folders, and the deletion of jobs that ended long ago."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState, NotFound
from millrace.events import TrainerLost
from millrace.ids import JobId, MemberId, Purpose
from millrace.rest import JobState, SampleView, StepMetrics
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.deletion import Deletion, Retention
from services.coordinator.observe.events import Events
from services.coordinator.state.bell import Bell
from services.coordinator.state.group import GroupSummary
from services.coordinator.store import Store
from services.coordinator.store.connection import text
from services.coordinator.store.records import StoredBatch
from tests.services.coordinator.redis import a_job, lead, queued, with_store


async def stored(store: Store, *numbers: int) -> list[JobId]:
    """Jobs that were submitted at the Unix times `numbers`."""
    return [(await store.jobs.create(a_job(number)))[0] for number in numbers]


async def pages(store: Store, limit: int, state: JobState | None = None) -> list[list[str]]:
    """Ids of all pages of the list of jobs."""
    found, cursor = [], ""
    while True:
        page = await store.index.page(limit, state, cursor)
        found.append([job.id for job in page.jobs])
        if page.next is None:
            return found
        cursor = page.next


async def end(store: Store, job_id: str, state: JobState = JobState.CANCELLED) -> None:
    await store.jobs.move(job_id, state, "over", only=[JobState.QUEUED, JobState.STARTING, JobState.RUNNING])


def test_pages_have_every_job_once_newest_first(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        await stored(store, 3, 1, 5, 2, 4)
        ids = [a_job(n).id for n in (5, 4, 3, 2, 1)]
        assert await pages(store, 2) == [ids[:2], ids[2:4], ids[4:]]
        assert await pages(store, 5) == [ids]
        page = await store.index.page(2)
        assert page.total == 5 and page.jobs[0] == replace(a_job(5), spec_json="")
        await stored(store, 6)  # while somebody turns the pages
        assert [job.id for job in (await store.index.page(2, None, page.next or "")).jobs] == ids[2:4]

    with_store(redis_url, scenario)


def test_jobs_of_the_same_instant_are_on_one_page_each(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        for number in range(5):
            await store.jobs.create(replace(a_job(number), created_s=1763843123.25))
        assert await pages(store, 2) == [[a_job(4).id, a_job(3).id], [a_job(2).id, a_job(1).id], [a_job(0).id]]

    with_store(redis_url, scenario)


def test_a_move_takes_a_job_to_the_list_of_its_new_state(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        first, second = await stored(store, 1, 2)
        await store.jobs.move(first, JobState.STARTING, "because", reward=0.5)
        assert await pages(store, 9, JobState.QUEUED) == [[second]]
        (found,) = (await store.index.page(9, JobState.STARTING)).jobs
        assert (found.id, found.state, found.reward, found.failure) == (first, JobState.STARTING, 0.5, None)
        assert await store.index.counts() == {**dict.fromkeys(JobState, 0), JobState.STARTING: 1, JobState.QUEUED: 1}
        assert [job.id for job in await store.index.active()] == [first]
        assert [job.id for job in await store.index.queued()] == [second]
        with pytest.raises(InvalidState):
            await store.jobs.move(first, JobState.QUEUED, "because")
        assert [(job.id, job.place) for job in await store.index.queued()] == [(second, "default")]

    with_store(redis_url, scenario)


def test_a_submission_costs_the_same_however_many_jobs_there_are(
    redis_url: str, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        control = Control(store, Events(store), Bell(), lambda job: None)
        work = []
        for number in range(2):
            before = await store.connection.do("INFO", "commandstats")
            await control.submit({**spec, "output": f"{spec['output']}-{number}"}, "")
            after = await store.connection.do("INFO", "commandstats")
            calls = {name: used["calls"] - before.get(name, {"calls": 0})["calls"] for name, used in after.items()}
            work.append({name: count for name, count in calls.items() if count})
            await stored(store, *range(1, 101))
        assert work[0] == work[1]

    with_store(redis_url, scenario)


async def _with_everything(store: Store, job_id: JobId) -> None:
    """Fills all that Redis can hold of a job."""
    prompts, records = store.prompts(job_id), store.records(job_id)
    for purpose in Purpose:
        ledger = store.prompts(job_id, purpose)
        await ledger.issue([queued(f"0-{n}", purpose) for n in range(6)], 1)
        done, refused, *_ = await ledger.lease(MemberId("rollout-a"), 5, 0)
        summary = GroupSummary(done.row.prompt_id, "sums", 3, [4], [1.0], [0], 0, 0.0, 0.0, "rollout-a")
        await ledger.complete(done.ref, b"group", summary)
        await ledger.refuse(refused.ref, 1, Drop(DropReason.REWARD_FAILED, "no"))
    await prompts.regenerate((await prompts.generated())[0], 1)
    await records.add_event(TrainerLost(step=1, setbacks=1), "lost")
    await records.set_rows(StepMetrics(step=1, time_s=1.0, values={}))
    sample = dict.fromkeys(("prompt_id", "purpose", "prompt", "answer", "ground_truth", "stop_reason", "member"), "")
    await records.add_samples([SampleView(**sample, step=1, reward=1.0, reward_failure=None, tokens=1, versions=[0])])
    await records.set_batch(StoredBatch(1, [], 0.0, [], True))
    await records.set_note("saving", {})
    await records.add_publication({})
    await records.add_checkpoint(1, {"path": "/out"})


def test_old_jobs_are_deleted_with_everything_that_they_own(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        ids = await stored(store, 1, 2, 3, 4)
        before = set(await store.connection.do("KEYS", "*"))
        await store.jobs.create(replace(a_job(5), folder="/out/5"), "key of 5")
        await _with_everything(store, a_job(5).id)
        for job_id in (a_job(5).id, *ids[:3]):
            await end(store, job_id)
        assert await Deletion(store, asyncio.Lock()).delete_beyond(Retention(4)) == 0
        assert await Deletion(store, asyncio.Lock()).delete_beyond(Retention(3)) == 1
        kept = {name for name in await store.connection.do("KEYS", "*") if b":answered:" not in name}
        assert kept - before == {b"millrace:jobs:cancelled", b"millrace:finished", b"millrace:idempotency:key of 5"}
        with pytest.raises(NotFound):
            await store.jobs.get(a_job(5).id)
        assert await pages(store, 9) == [ids[::-1]]
        assert await store.index.with_output("/out/5") == []
        assert await Deletion(store, asyncio.Lock()).delete_beyond(Retention(0)) == 3
        assert await pages(store, 9) == [[ids[3]]]
        again, new = await store.jobs.create(a_job(6), "key of 5")  # the job that had the key is gone
        assert (again, new) == (a_job(6).id, True)

    with_store(redis_url, scenario)


def test_a_job_that_was_resumed_is_not_deleted(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        (job_id,) = await stored(store, 1)
        await end(store, job_id)
        assert await store.index.finished_beyond(0) == [job_id]
        await store.jobs.move(job_id, JobState.QUEUED, "again")
        assert await store.index.finished_beyond(0) == []
        assert not await store.index.delete(job_id)
        assert (await store.jobs.get(job_id)).state is JobState.QUEUED

    with_store(redis_url, scenario)


def test_jobs_of_a_release_without_an_index_are_added(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        ids = await stored(store, 1, 2, 3)
        await end(store, ids[0])
        for name in await store.connection.do("KEYS", "*"):
            if text(name).startswith(("millrace:jobs:", "millrace:finished", "millrace:output:")):
                await store.connection.do("DEL", name)
        for job_id in ids:
            await store.connection.do("HDEL", f"millrace:job:{job_id}", "folder")
        for _ in range(2):
            await lead(store)
            assert await pages(store, 9, JobState.QUEUED) == [[ids[2], ids[1]]]
            assert await store.index.finished_beyond(0) == [ids[0]]
            assert [job.id for job in await store.index.with_output("/out/2")] == [ids[1]]

    with_store(redis_url, scenario)


def test_several_read_and_move_at_the_same_time(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        ids = await stored(store, *range(1, 31))
        moves = (end(store, job_id) for job_id in ids[::2])
        await asyncio.gather(*moves, *(pages(store, 4) for _ in range(4)))
        assert await pages(store, 30, JobState.CANCELLED) == [ids[::2][::-1]]
        assert await pages(store, 30) == [ids[::-1]]

    with_store(redis_url, scenario)


def test_the_steps_of_a_job_are_known_as_soon_as_its_spec_or_its_data_says_them(
    redis_url: str, spec: dict[str, Any]
) -> None:
    """0 steps are those of a job that only evaluates its model; they were shown as those of a job that is not known."""
    schedule = {name: value for name, value in spec["schedule"].items() if name != "steps"}

    async def scenario(store: Store) -> None:
        control = Control(store, Events(store), Bell(), lambda job: None)
        shown = []
        for number, steps in enumerate(({"steps": 0}, {"steps": 7}, {})):
            tree = {**spec, "output": f"{spec['output']}-{number}", "schedule": {**schedule, **steps}}
            job, _ = await control.submit(tree, "")
            shown.append(job.summary(None).steps_shown)
        assert shown == ["0", "7", "?"]
        await store.jobs.update(job.id, steps=3)
        (found,) = (await store.index.page(1)).jobs
        assert found.summary(None).steps_shown == "3"

    with_store(redis_url, scenario)
