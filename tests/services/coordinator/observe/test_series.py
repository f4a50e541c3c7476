"""Curves of jobs of any length: few points, each with mean, least and greatest value of its steps."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from millrace.ids import Purpose
from millrace.rest import SeriesView, StepMetrics
from services.coordinator.observe import series
from services.coordinator.observe.series import Point
from services.coordinator.store import Store
from services.coordinator.store.records import Records
from tests.services.coordinator.redis import a_job

STEPS = 2345
TOKENS = "perf/total_num_tokens"


def row(step: int) -> StepMetrics:
    values = {"actor/grad_norm": random.Random(step).uniform(-2, 5), TOKENS: 10.0}
    if step % 25 == 0:
        values["val-core/sums/reward/mean@1"] = step / STEPS
    if step == 1777:
        values["actor/pg_loss"] = math.nan
    return StepMetrics(step=step, time_s=1000.0 + step, values=values)


@asynccontextmanager
async def filled(url: str, steps: int) -> AsyncIterator[tuple[Store, Records, str]]:
    store, job = Store(url), a_job()
    try:
        await store.connection.do("FLUSHALL")
        await store.jobs.create(job)
        records = store.records(job.id)
        await records.set_rows(*(row(step) for step in range(steps + 1)))
        await store.jobs.update(job.id, step=steps)
        yield store, records, job.id
    finally:
        await store.close()


def reference(key: str, steps: Sequence[int]) -> list[tuple[float, float, float] | None]:
    """Mean, least and greatest value of the steps after each of `steps`' predecessors up to it."""
    found, first = [], 0
    for last in steps:
        values = [row(step).values[key] for step in range(first, last + 1) if key in row(step).values]
        found.append((sum(values) / len(values), min(values), max(values)) if values else None)
        first = last + 1
    return found


def assert_same(view: SeriesView, key: str) -> None:
    band = view.metrics[key]
    for number, expected in enumerate(reference(key, view.steps)):
        told = (band.mean[number], band.least[number], band.greatest[number])
        assert told == (None, None, None) if expected is None else told == pytest.approx(expected, rel=1e-4), number


def test_a_long_job_is_drawn_with_few_points(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, STEPS) as (_, records, _id):
            keys = ["actor/grad_norm", "val-core/sums/reward/mean@1"]
            for _ in range(2):  # from the rows, then from what was kept
                view = await series.series(records, keys, 0, STEPS, STEPS, 100)
                assert len(view.steps) <= 100 and view.steps[-1] == STEPS and view.time_s[-1] == 1000.0 + STEPS
                assert sum(view.tokens) == 10.0 * (STEPS + 1)
                for key in keys:
                    assert_same(view, key)
            kept = await records.series([series.name(10, start) for start in range(0, STEPS, 10)])
            assert all(point is not None for point in kept[:-1]) and kept[-1] is None

    asyncio.run(play())


def test_few_steps_are_drawn_one_by_one(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, 30) as (_, records, _id):
            view = await series.series(records, ["actor/grad_norm", "nowhere"], 5, 30, 30, 500)
            band = view.metrics["actor/grad_norm"]
            assert view.steps == [*range(5, 31)] and band.least == []
            assert band.mean == [row(step).values["actor/grad_norm"] for step in view.steps]
            assert view.metrics["nowhere"].mean == [None] * 26

    asyncio.run(play())


def test_points_are_kept_as_soon_as_their_steps_are_over(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, 100) as (_, records, _id):
            for step in range(101):
                await series.keep(records, step)
            names = [series.name(10, start) for start in range(0, 100, 10)] + [series.name(100, 0)]
            assert None not in await records.series([*names])
            assert await records.series([series.name(10, 100)]) == [None]

    asyncio.run(play())


def test_what_comes_late_to_a_row_is_in_its_points(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, 100) as (_, records, _id):
            for step in range(101):
                await series.keep(records, step)
            before = await records.series([series.name(10, 90), series.name(10, 80)])
            await records.set_rows(StepMetrics(step=99, time_s=1099.0, values=row(99).values | {"late": 7.0}))
            await series.make_again(records, 99, 100)
            found = await records.series([series.name(10, 90), series.name(10, 80), series.name(100, 0)])
            assert found[1] == before[1] and found[0] != before[0]
            for data in (found[0], found[2]):
                assert data is not None and Point.from_json(data).values["late"] == (1, 7.0, 7.0, 7.0)
            await series.make_again(records, 100, 100)
            assert await records.series([series.name(10, 100)]) == [None], "its steps are not over"

    asyncio.run(play())


def test_a_rewind_forgets_the_points_of_its_steps(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, 60) as (store, records, job_id):
            for step in range(61):
                await series.keep(records, step)
            await store.prompts(job_id, Purpose.TRAIN).rewind(33)
            kept = await records.series([series.name(10, start) for start in range(0, 60, 10)])
            assert [point is not None for point in kept] == [True, True, True, False, False, False]

    asyncio.run(play())


def test_a_value_that_is_not_finite_stays_so() -> None:
    """A loss of NaN must not look like a gap, or like a number."""
    merged = Point.merged([Point.of_row(row(step)) for step in range(1770, 1780)])
    assert math.isnan(merged.values["actor/pg_loss"].mean)
    again = Point.from_json(merged.to_json().encode())
    assert math.isnan(again.values["actor/pg_loss"].mean) and again.values["actor/grad_norm"].steps == 10


def test_every_metric_is_described(redis_url: str) -> None:
    async def play() -> None:
        async with filled(redis_url, 66) as (_, records, _id):
            for noted in (False, True):  # from all rows, and from what was noted and the newest rows
                found = {metric.key: metric for metric in await series.metrics(records, 66)}
                assert found["actor/grad_norm"].section == "Losses and updates" and found["actor/grad_norm"].meaning
                assert found["val-core/sums/reward/mean@1"].section == "Evaluation"
                assert await records.metric_keys() == (found.keys() if noted else set())
                for step in range(67):
                    await series.keep(records, step)

    asyncio.run(play())
