"""Pages of groups, with filters, over many samples."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.rest import GroupView, SampleView
from services.coordinator.observe import groups
from services.coordinator.observe.groups import Wanted
from services.coordinator.store import Store
from services.coordinator.store.records import Records
from tests.services.coordinator.redis import a_job


def sample(step: int, prompt: str, number: int) -> SampleView:
    chance = random.Random(f"{prompt} {number}")
    return SampleView(
        step=step,
        prompt_id=prompt,
        purpose="train" if step % 5 else "evaluation",
        prompt=f"say {prompt}",
        answer=f"Answer {chance.randint(0, 30)}.",
        ground_truth=None,
        reward=chance.random(),
        reward_failure=None,
        stop_reason="length",
        tokens=1,
        versions=[0],
        member=f"rollout-{step % 3}",
        data_source="sums",
    )


@asynccontextmanager
async def filled(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Records, list[SampleView]]]:
    """Groups of 1 to 4 samples, three a step. Reads are small, so that groups lie on their borders."""
    monkeypatch.setattr(groups, "READ", 7)
    store, job = Store(url), a_job()
    try:
        await store.connection.do("FLUSHALL")
        await store.jobs.create(job)
        records = store.records(job.id)
        found = [
            sample(step, f"{step}-{prompt}", number)
            for step in range(1, 41)
            for prompt in range(3)
            for number in range(1 + (step + prompt) % 4)
        ]
        await records.add_samples(found)
        yield records, found
    finally:
        await store.close()


async def all_pages(records: Records, wanted: Wanted, limit: int) -> list[GroupView]:
    found: list[GroupView] = []
    cursor: int | None = None
    while True:
        page = await groups.page(records, wanted, limit, cursor)
        assert len(page.groups) <= limit
        found += page.groups
        if page.next is None:
            return found
        assert cursor is None or page.next < cursor
        cursor = page.next


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"step": 17},
        {"step": 99},
        {"purpose": "evaluation"},
        {"member": "rollout-2"},
        {"text": "ANSWER 3."},
        {"least": 0.9},
        {"greatest": 0.05},
        {"least": 0.4, "greatest": 0.5},
        {"data_source": "none"},
    ],
    ids=str,
)
def test_pages_have_each_group_once_and_whole(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    async def play() -> None:
        async with filled(redis_url, monkeypatch) as (records, samples):
            expected = [g for g in reversed([*groups._groups(samples)]) if Wanted(**wanted).fits(g)]
            assert bool(expected) == (wanted.get("step") != 99 and "data_source" not in wanted)
            for limit in (1, 5, 200):
                assert await all_pages(records, Wanted(**wanted), limit) == expected

    asyncio.run(play())


def test_a_page_looks_at_a_bounded_number_of_samples(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with filled(redis_url, monkeypatch) as (records, samples):
            monkeypatch.setattr(groups, "MOST_READ", 30)
            page = await groups.page(records, Wanted(text="nowhere"), 10, None)
            assert not page.groups and page.next is not None
            assert len(samples) - 40 <= page.next <= len(samples) - 30
            assert await all_pages(records, Wanted(text="nowhere"), 10) == []

    asyncio.run(play())
