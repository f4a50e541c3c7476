"""Deaths that are charged to a job do not add up over its whole life."""

from millrace.ids import MemberId
from services.coordinator.state.faults import COUNT_S, place_of
from services.coordinator.store import Store
from services.coordinator.store.connection import text
from tests.services.coordinator.redis import a_job, queued, with_store

PLACE = place_of("rollout", "a:1")


def test_a_trained_step_settles_deaths_of_places_and_last_words(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        job, _ = await store.jobs.create(a_job(1))
        deaths, prompts = store.deaths(job), store.prompts(job)
        await deaths.charge(PLACE, "m1")
        await deaths.say(MemberId("m1"), "IndexError")
        await deaths.set_back(0, "t1")
        assert (await deaths.all()).of_place == {PLACE: 1}
        assert await prompts.train([], 1, 1.0, "{}", [], 10)
        settled = await deaths.all()
        assert (settled.of_place, settled.words) == ({}, "")
        await deaths.guess(MemberId("m2"), "it is silent")
        assert await deaths.words() == "it is silent", "not the words of a death before the step"
        assert await deaths.set_back(0, "t2") == 2, "the trainer has to get beyond the step at which it was lost"
        assert await deaths.set_back(1, "t3") == 1

    with_store(redis_url, scenario)


def test_deaths_that_nothing_settles_are_forgotten(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        job, _ = await store.jobs.create(a_job(1))
        deaths, prompts = store.deaths(job), store.prompts(job)
        await prompts.issue([queued("0-0")], 0, (0, 1))
        await prompts.lease(MemberId("m1"), 1, 0)
        await prompts.take_back(MemberId("m1"), 1, "was ended by SIGKILL")
        await deaths.charge(PLACE, "m1")
        await deaths.set_back(0, "t1")
        await deaths.guess(MemberId("m1"), "it is silent")
        keys = [text(key) for key in await store.connection.do("KEYS", "millrace:job:*")]
        kept = [key for key in keys if key.rpartition(":")[2] in ("deaths", "setbacks", "last_words")]
        assert len(kept) == 4
        for key in kept:
            assert 0 < await store.connection.do("TTL", key) <= COUNT_S, key

    with_store(redis_url, scenario)
