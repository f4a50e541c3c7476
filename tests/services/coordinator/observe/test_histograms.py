"""Histograms of steps: made from groups and the trainer's answer, kept for the newest steps, read evenly spread."""

import json
from collections.abc import Awaitable, Callable

import pytest

from millrace.contracts.v1 import trainer_pb2
from millrace.ids import Purpose, Version
from millrace.rest import HistogramView
from millrace.telemetry.metrics.histograms import Histogram
from services.coordinator.observe import histograms
from services.coordinator.store import Store, prompts
from services.coordinator.store.records import Records
from tests.services.coordinator.observe.test_step_metrics import summary
from tests.services.coordinator.redis import a_job, with_store


def test_of_groups() -> None:
    groups = [summary(3, [4, 6], [0.0, 1.0], [4, 5]), summary(2, [6, 6], [1.0, 1.0], [5, 5])]
    found = histograms.of_groups(groups, Version(6))
    assert found["response_length"] == Histogram((4.0, 5.0, 6.0, 7.0), (1, 0, 3))
    assert found["training/staleness"] == Histogram((1.0, 2.0, 3.0), (3, 1))
    assert found["critic/score"].counts[0] == 1 and found["critic/score"].counts[-1] == 3


def test_of_the_trainer() -> None:
    answer = trainer_pb2.StepResponse()
    answer.histograms["critic/advantages"].CopyFrom(trainer_pb2.Histogram(edges=[-1, 0, 1], counts=[3, 5]))
    answer.histograms["training/importance_ratio"].CopyFrom(trainer_pb2.Histogram(edges=[0, 1], counts=[3, 5]))
    assert histograms.of_trainer(answer) == {"critic/advantages": Histogram((-1.0, 0.0, 1.0), (3, 5))}


async def trained(store: Store, steps: int) -> Records:
    """A job of that many steps; of step N one value, N."""
    job = a_job()
    await store.jobs.create(job)
    ledger = store.prompts(job.id, Purpose.TRAIN)
    for step in range(1, steps + 1):
        stored = histograms.to_json({"response_length": Histogram((float(step), float(step)), (1,))})
        assert await ledger.train([], step, 0.0, json.dumps({"step": step}), [], 1, stored)
    return store.records(job.id)


def steps_of(redis_url: str, steps: int, look: Callable[[Store, Records], Awaitable[list[HistogramView]]]) -> list[int]:
    """The steps of the views that `look` answers, whose edges name them."""

    async def play(store: Store) -> list[HistogramView]:
        return await look(store, await trained(store, steps))

    views = with_store(redis_url, play)
    assert all(view.key == "response_length" and not view.fixed for view in views)
    found = views[0].steps if views else []
    assert not views or views[0].edges == [[float(step), float(step)] for step in found]
    return found


def test_steps_are_spread_evenly_and_the_last_is_among_them(redis_url: str) -> None:
    async def look(_: Store, records: Records) -> list[HistogramView]:
        return await histograms.views(records, 0, 12, 12, 4)

    assert steps_of(redis_url, 12, look) == [2, 5, 8, 12]


def test_a_rewind_forgets_those_of_its_steps(redis_url: str) -> None:
    async def look(store: Store, records: Records) -> list[HistogramView]:
        await store.prompts(a_job().id, Purpose.TRAIN).rewind(3)
        return await histograms.views(records, 0, 6, 6, 100)

    assert steps_of(redis_url, 6, look) == [1, 2, 3]


def test_only_those_of_the_newest_steps_are_kept(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "STEPS_KEPT", 4)

    async def look(_: Store, records: Records) -> list[HistogramView]:
        return await histograms.views(records, 0, 9, 9, 100)

    assert steps_of(redis_url, 9, look) == [6, 7, 8, 9]
