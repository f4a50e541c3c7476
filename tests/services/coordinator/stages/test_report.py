"""The report of a job, and what becomes of the job where there can be none."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.rest import JobState
from services.coordinator.observe.events import Events
from services.coordinator.stages.report import report
from services.coordinator.store import Store, StoreDown
from tests.services.coordinator.redis import a_job, with_store


def a_run(store: Store, folder: Path) -> Any:
    job, events = dataclasses.replace(a_job(), step=1), Events(store)
    return SimpleNamespace(
        job=job,
        records=store.records(job.id),
        prompts=store.prompts(job.id),
        spec=SimpleNamespace(output=str(folder)),
        tell=lambda data, message: events.add(job.id, data, message),
    )


def test_a_report_that_cannot_be_made_is_told(redis_url: str, tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        run = a_run(store, tmp_path)
        await store.jobs.create(run.job)
        await store.connection.do("HSET", f"millrace:job:{run.job.id}:metrics", 1, "{}")
        await report(run, JobState.SUCCEEDED, "finished")
        (told,) = [event for event in await run.records.events() if event.kind == "report.failed"]
        assert str(tmp_path) in told.message and "StepMetrics" in told.message
        assert (await store.jobs.get(run.job.id)).report is None

    with_store(redis_url, scenario)
    assert not list(tmp_path.iterdir())


def test_without_redis_it_is_made_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(f"unix://{tmp_path}/nobody")
        with pytest.raises(StoreDown):
            await report(a_run(store, tmp_path), JobState.SUCCEEDED, "finished")
        await store.close()

    asyncio.run(scenario())
