"""Jobs that are deleted: what goes with them, what refuses it, and the limits of what is kept."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import app as command
from millrace.errors import InvalidState, NotFound
from millrace.rest import JobState
from services.coordinator.jobs.deletion import Deletion, Retention
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from tests.services.coordinator.cluster import Cluster, scenario
from tests.services.coordinator.redis import a_job, lead, with_store


async def ended(store: Store, number: int, folder: Path) -> JobRecord:
    """A job that failed with two checkpoints in its output, and a link to one."""
    output = folder / str(number)
    job = replace(a_job(number), spec_json=json.dumps({"output": str(output)}))
    await store.jobs.create(job)
    for step in (1, 2):
        path = output / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        (path / "trainer.json").write_text("{}")
        await store.records(job.id).add_checkpoint(step, {"path": str(path)})
    (output / "checkpoints" / "best").symlink_to("step-1")
    await store.jobs.move(job.id, JobState.FAILED, "over", only=[JobState.QUEUED], finished_s=time.time())
    return job


def deleting(url: str, play: Callable[[Store, Deletion], Awaitable[None]]) -> None:
    async def run(store: Store) -> None:
        await lead(store)
        await play(store, Deletion(store, asyncio.Lock()))

    with_store(url, run)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_checkpoints_go_where_that_is_asked(checkpoints: bool, redis_url: str, tmp_path: Path) -> None:
    async def play(store: Store, deletion: Deletion) -> None:
        job, kept = await ended(store, 1, tmp_path), await ended(store, 2, tmp_path)
        (tmp_path / "1" / "report.md").write_text("a report")
        gone = await deletion.delete(job.id, checkpoints=checkpoints)
        assert len(gone.checkpoints) == 2 * checkpoints
        assert (tmp_path / "1" / "checkpoints").exists() != checkpoints
        assert (tmp_path / "1" / "report.md").exists() and (tmp_path / "2" / "checkpoints" / "best").exists()
        with pytest.raises(NotFound):
            await deletion.delete(job.id)
        assert (await store.jobs.get(kept.id)).state is JobState.FAILED

    deleting(redis_url, play)


def test_checkpoints_that_another_job_uses_or_that_are_links_stay(redis_url: str, tmp_path: Path) -> None:
    async def play(store: Store, deletion: Deletion) -> None:
        job, precious = await ended(store, 1, tmp_path), tmp_path / "precious"
        used = str(tmp_path / "1" / "checkpoints" / "step-2" / "huggingface")
        spec = {"output": "/out", "model": {"path": "/base"}, "pools": [{"name": "teacher", "path": used}]}
        other = replace(a_job(2), spec_json=json.dumps(spec))
        await store.jobs.create(other)
        with pytest.raises(InvalidState, match=f"{other.id} .* is queued and uses its checkpoints"):
            await deletion.delete(job.id, checkpoints=True)
        await store.jobs.move(other.id, JobState.CANCELLED, "over", only=[JobState.QUEUED], finished_s=time.time())
        (tmp_path / "1" / "checkpoints" / "step-1").rename(precious)
        (tmp_path / "1" / "checkpoints" / "step-1").symlink_to(precious)
        with pytest.raises(InvalidState, match="cannot be removed"):
            await deletion.delete(job.id, checkpoints=True)
        assert (precious / "trainer.json").exists() and (await store.jobs.get(job.id)).id == job.id
        await deletion.delete(job.id)

    deleting(redis_url, play)


def test_a_job_that_has_not_ended_stays(redis_url: str) -> None:
    async def play(store: Store, deletion: Deletion) -> None:
        await store.jobs.create(job := a_job(1))
        with pytest.raises(InvalidState, match="is queued and cannot be deleted"):
            await deletion.delete(job.id)

    deleting(redis_url, play)


def test_nothing_is_deleted_within_the_limits(redis_url: str, tmp_path: Path) -> None:
    async def left(store: Store) -> list[str]:
        return [job.id for job in (await store.index.page(9)).jobs]

    async def play(store: Store, deletion: Deletion) -> None:
        jobs = [await ended(store, number, tmp_path) for number in (1, 2, 3)]
        await store.connection.do("ZADD", "millrace:finished", time.time() - 3 * 86400, jobs[1].id)
        assert await deletion.delete_beyond(Retention(3)) == 0
        assert await deletion.delete_beyond(Retention(3, days=4)) == 0
        assert await deletion.delete_beyond(Retention(3, days=2)) == 1
        assert await left(store) == [jobs[2].id, jobs[0].id] and (tmp_path / "2" / "checkpoints" / "step-1").exists()
        (tmp_path / "1" / "checkpoints" / "step-1" / "trainer.json").unlink()
        (tmp_path / "1" / "checkpoints" / "step-1").rmdir()
        (tmp_path / "1" / "checkpoints" / "step-1").write_text("no folder: it cannot be removed as one")
        assert await deletion.delete_beyond(Retention(0, delete_checkpoints=True)) == 1
        assert await left(store) == [jobs[0].id] and not (tmp_path / "3" / "checkpoints").exists()

    deleting(redis_url, play)


@scenario
async def test_by_the_command(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer(), await cluster.replica()
    spec["schedule"] |= {"steps": 2, "save_every_steps": 1, "keep_checkpoints": 9, "keep_checkpoints_days": 0.001}
    job = await cluster.ended(await cluster.submit(spec))
    folder = Path(spec["output"]) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]

    def run(*arguments: str, given: str = "") -> Any:
        asked = ["delete", job.id, "--url", cluster.coordinator.client.url, *arguments]
        return CliRunner().invoke(command, asked, input=given)

    assert (await asyncio.to_thread(run, given="n\n")).exit_code == 1
    assert (await cluster.job(job.id)).id == job.id
    done = await asyncio.to_thread(run, "--checkpoints", "--yes")
    assert done.exit_code == 0 and re.sub(r"\s", "", done.output).startswith(f"{job.id}deleted{folder}/step-1")
    assert not folder.exists() and (Path(spec["output"]) / "report.md").exists()
    with pytest.raises(NotFound):
        await cluster.job(job.id)
