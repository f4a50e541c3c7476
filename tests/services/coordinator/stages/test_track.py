"""Trackers that fail in every way that there is. They cost their rows."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace import trackers
from millrace.ids import Version
from millrace.rest import SampleView, StepMetrics
from services.coordinator.observe.events import Events
from services.coordinator.stages import track as stage
from services.coordinator.stages.track import track, track_again
from services.coordinator.store import Store
from tests.services.coordinator.redis import a_job, with_store
from tests.test_trackers import a_sample

SENT: list[int] = []
"""Steps that arrived."""
SAMPLES: list[tuple[int, list[str]]] = []
"""Answers that arrived, with their step."""


class Told:
    """Keeps what it is told, unless it is to fail."""

    def __init__(self, run: trackers.TrackedJob) -> None:
        if run.name in FAULTS:
            FAULTS[run.name]()
        self._fault = FAULTS.get(run.name.removeprefix("later "), lambda: None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._fault()
        SENT.append(step)

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        self._fault()
        SAMPLES.append((step, [sample.answer for sample in samples]))

    def close(self) -> None:
        self._fault()


class Sound(Told):
    def __init__(self, run: trackers.TrackedJob) -> None:
        self._fault = lambda: None


def raises() -> None:
    raise KeyError("anything")


FAULTS: dict[str, Any] = {"raises": raises, "hangs": lambda: time.sleep(120), "exits": lambda: sys.exit(3)}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("Told", "Sound"):
        monkeypatch.setitem(trackers.TRACKERS, name, trackers.TrackerEntry(__name__, name, "pytest"))
    monkeypatch.setattr(stage, "LIMIT_S", 0.5)
    SENT.clear()
    SAMPLES.clear()
    yield


def a_run(store: Store, names: list[str], fault: str = "") -> Any:
    job, events = dataclasses.replace(a_job(), name=fault), Events(store)
    tracking = SimpleNamespace(trackers=names, project="millrace", offline=False, api_key=None)
    return SimpleNamespace(
        job=job,
        records=store.records(job.id),
        spec=SimpleNamespace(output="/nowhere", tracking=tracking, model_dump=lambda mode: {}),
        trackers=None,
        evaluating=None,
        done=False,
        step_began={},
        groups_of_step=[],
        tell=lambda data, message: events.add(job.id, data, message),
    )


async def reaches(run: Any, step: int) -> None:
    run.job = dataclasses.replace(run.job, step=step)
    await run.records.set_rows(StepMetrics(step=step, time_s=0.0, values={}))
    await track(run)


@pytest.mark.parametrize("fault", [*FAULTS, *(f"later {fault}" for fault in FAULTS)])
def test_a_tracker_that_fails_costs_its_rows_only(redis_url: str, fault: str) -> None:
    async def scenario(store: Store) -> None:
        run = a_run(store, ["Told", "Sound"], fault)
        for step in (0, 1):
            await reaches(run, step)
        assert SENT == [0, 1] and await run.records.note(stage.NOTE) == 1
        told = [event.message for event in await run.records.events() if event.kind == "tracker.failed"]
        assert told and all(message.startswith("Told ") for message in told)
        for tracker in run.trackers:
            await asyncio.to_thread(tracker.close)

    began = time.monotonic()
    with_store(redis_url, scenario)
    assert time.monotonic() - began < 60.0


def test_a_row_is_sent_when_the_evaluation_of_its_step_is_over(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        run = a_run(store, ["Told"])
        for step in (0, 1):
            await reaches(run, step)
        run.evaluating = SimpleNamespace(step=2)
        for step in (2, 3):
            await reaches(run, step)
            assert SENT == [0, 1] and await run.records.note(stage.NOTE) == 1
        run.evaluating = None
        await reaches(run, 4)
        assert SENT == [0, 1, 2, 3, 4]

    with_store(redis_url, scenario)


def test_a_tracker_gets_the_key_that_is_named_and_is_left_out_without_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys: list[str] = []

    class WithKey(Sound):
        def __init__(self, run: trackers.TrackedJob) -> None:
            super().__init__(run)
            assert run.api_key is not None and "s3cret" not in repr(run)
            keys.append(run.api_key.get_secret_value())

    monkeypatch.setitem(globals(), "WithKey", WithKey)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", trackers.TrackerEntry(__name__, "WithKey", "pytest"))

    async def scenario(store: Store) -> None:
        (tmp_path / "key").write_text("s3cret\n")
        run = a_run(store, ["wandb", "Told"])
        run.spec.tracking.api_key = f"file:{tmp_path}/key"
        await reaches(run, 0)
        assert keys == ["s3cret"] and len(run.trackers) == 2

        (tmp_path / "key").unlink()
        run.trackers = None
        await reaches(run, 1)
        (told,) = [event.message for event in await run.records.events() if event.kind == "tracker.failed"]
        assert "wandb is not used: tracking.api_key" in told and "No such file" in told
        assert keys == ["s3cret"] and [str(tracker) for tracker in run.trackers] == ["Told"]

    with_store(redis_url, scenario)


def test_what_is_trained_again_is_sent_again(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        run = a_run(store, ["Sound"])
        for step in (0, 1, 2, 3):
            await reaches(run, step)
        await track_again(run, Version(1))
        for step in (2, 3):
            await reaches(run, step)
        await track_again(run, Version(5))
        await reaches(run, 4)
        assert SENT == [0, 1, 2, 3, 2, 3, 4]

    with_store(redis_url, scenario)


def test_samples_are_sent_with_the_row_of_their_step(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        run = a_run(store, ["Sound"])
        for step in (0, 1, 2, 3):
            await run.records.add_samples([a_sample(step, answer=f"{step} {number}") for number in range(step)])
            await reaches(run, step)
        assert SAMPLES == [(1, ["1 0"]), (2, ["2 0", "2 1"]), (3, ["3 0", "3 1", "3 2"])]
        await track_again(run, Version(1))
        SAMPLES.clear()
        await run.records.add_samples([a_sample(2, answer="again")])
        await reaches(run, 2)
        assert SAMPLES == [(2, ["again"])]

    with_store(redis_url, scenario)


def test_the_samples_of_many_steps_are_found_page_by_page(redis_url: str) -> None:
    async def scenario(store: Store) -> None:
        records = store.records(a_job().id)
        await records.add_samples([a_sample(step, answer=str(number)) for step in range(10) for number in range(50)])
        found = await records.samples_between(3, 9)
        assert [(one.step, one.answer) for one in found] == [(step, str(n)) for step in range(4, 10) for n in range(50)]
        assert len(await records.samples_between(-1, 9)) == 500
        assert await records.samples_between(3, 8) == []

    with_store(redis_url, scenario)
