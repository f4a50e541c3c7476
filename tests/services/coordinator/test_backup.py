"""What the coordinators know is saved to a file, and a job goes on from it elsewhere."""

import asyncio
import json
import shutil
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.rest import JobState
from millrace.validation.places import ALLOWED
from services.coordinator.redis_server import RedisServer
from services.coordinator.stages.checkpoint_copies import MANIFEST, Copies
from services.coordinator.store import Store
from services.coordinator.store.leadership import LEADER
from tests.forked import run_forked
from tests.services.coordinator.cluster import around
from tests.services.coordinator.conftest import running
from tests.services.coordinator.redis import a_job, lead, with_store
from tests.services.coordinator.stages.test_checkpoint_copies import a_checkpoint
from tests.services.coordinator.test_recovery import trained_once

pytestmark = pytest.mark.slow


def backup(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    done = run_forked("services.coordinator.backup", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done


async def dumped(store: Store) -> dict[bytes, bytes]:
    found = await store.connection.run("dump", [])
    return dict(zip(found[::3], found[2::3], strict=True))


def test_a_job_goes_on_elsewhere_from_a_backup_and_its_checkpoint(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Only the file and the output folder come to the other place: another Redis, other ports, other members."""
    file, copied, output = tmp_path / "backup", tmp_path / "copied", Path(spec["output"])
    spec["schedule"]["save_every_steps"] = 2

    saved_once, never = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        if request.step in (4, 6):
            await (saved_once if request.step == 4 else never).wait()

    async def before() -> str:
        with running(tmp_path / "here") as process:
            async with around(process) as cluster:
                trainer, _ = await cluster.trainer(), await cluster.replica(seconds=0.02)
                trainer.faults["Step"] = hold
                job_id = await cluster.submit(spec)
                await cluster.reached(job_id, 3, 120)
                saved = await asyncio.to_thread(backup, "save", file, "--state-dir", process.folder)
                assert saved.returncode == 0, saved.stderr
                assert f"{job_id} sums: running" in saved.stdout and str(output) in saved.stdout
                assert file.stat().st_mode & 0o777 == 0o600
                saved_once.set()
                await cluster.reached(job_id, 5, 120)  # what comes after the backup is lost
                process.kill()
                return job_id

    job_id = asyncio.run(before())
    output.rename(copied)
    there = tmp_path / "there"
    refused = backup("load", file, "--state-dir", there)
    assert refused.returncode == 1 and "missing on this host" in refused.stderr and job_id in refused.stderr
    shutil.copytree(copied, output)
    restored = backup("load", file, "--state-dir", there)
    assert restored.returncode == 0 and "continues from" in restored.stdout, restored.stderr

    async def after() -> None:
        with running(there) as process:
            again = await asyncio.to_thread(backup, "load", file, "--state-dir", there, "--replace")
            assert again.returncode == 1 and "another coordinator uses the state folder" in again.stderr
            async with around(process) as cluster:
                trainer, _ = await cluster.trainer(), await cluster.replica(seconds=0.02)
                job = await cluster.ended(job_id, 120)
                assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
                assert trainer.configured and trainer.configured[-1].startswith(str(output))
                await trained_once(cluster, job_id, trainer)

    asyncio.run(after())


def test_a_checkpoint_may_be_in_the_jobs_object_store_instead(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is gone, as on another host: the coordinator fetches the copy, if that is complete."""
    file, folder, url = tmp_path / "backup", a_checkpoint(tmp_path / "out"), f"file://{tmp_path}/store"
    spec = {"output": str(tmp_path / "out"), "schedule": {"checkpoint_store": url}}
    job = replace(a_job(), spec_json=json.dumps(spec))

    async def filled(store: Store) -> None:
        await lead(store)
        await store.jobs.create(job)
        await store.records(job.id).add_checkpoint(3, {"path": str(folder)})

    with_store(redis_url, filled)
    assert backup("save", file, "--redis-url", redis_url).returncode == 0
    with_store(redis_url, lambda store: store.connection.do("FLUSHALL"))
    load = ("load", file, "--redis-url", redis_url)
    monkeypatch.setenv(ALLOWED, url)
    copies = Copies(url, job.id)
    copies.write(3, folder, threading.Event())
    shutil.rmtree(folder)
    (tmp_path / "store" / job.id / "step-3" / MANIFEST).rename(tmp_path / "kept")
    refused = backup(*load)
    assert refused.returncode == 1 and f"{folder} ({job.id}, no copy in {url})" in refused.stderr
    (tmp_path / "kept").rename(tmp_path / "store" / job.id / "step-3" / MANIFEST)
    monkeypatch.delenv(ALLOWED)
    refused = backup(*load)
    assert refused.returncode == 1 and f"have an operator name some in {ALLOWED}" in refused.stderr
    monkeypatch.setenv(ALLOWED, url)
    restored = backup(*load)
    assert restored.returncode == 0 and f"continues from {folder}" in restored.stdout, restored.stderr


def test_a_backup_is_exact_and_bad_ones_are_refused(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup"

    async def filled() -> dict[bytes, bytes]:
        store = Store(redis_url)
        await store.connection.do("FLUSHALL")
        await lead(store)
        await store.jobs.create(a_job(1), "a key")
        await store.jobs.create(a_job(2))
        await store.connection.do("SET", "millrace:text", b"\x00\xff" * 1000)
        await store.connection.do("SET", "somebody:else", "1")
        found = await dumped(store)
        await store.close()
        return found

    async def restored(url: str) -> dict[bytes, bytes]:
        store = Store(url)
        try:
            return await dumped(store)
        finally:
            await store.close()

    async def told(url: str, *command: str) -> Any:
        store = Store(url)
        try:
            return await store.connection.do(*command)
        finally:
            await store.close()

    with asyncio.Runner() as runner:
        before = runner.run(filled())
        assert backup("save", file, "--redis-url", redis_url).returncode == 0
        other = RedisServer(tmp_path / "other")
        runner.run(other.start())
        at = ("--redis-url", other.url)
        assert backup("load", file, *at).returncode == 0
        assert runner.run(restored(other.url)) == before and b"somebody:else" not in before
        assert runner.run(told(other.url, "PTTL", "millrace:idempotency:a key")) > 0

        assert "holds jobs already" in backup("load", file, *at).stderr
        assert backup("load", file, *at, "--replace").returncode == 0
        runner.run(told(other.url, "SET", LEADER, "{}"))
        assert "stop all coordinators first" in backup("load", file, *at, "--replace").stderr
        runner.run(told(other.url, "DEL", LEADER))

        for damage in ("cut", "key", "format"):
            bad = tmp_path / damage
            if damage == "cut":
                bad.write_bytes(file.read_bytes()[:-100])
            else:
                with zipfile.ZipFile(file) as good, zipfile.ZipFile(bad, "w") as archive:
                    manifest = json.loads(good.read("manifest.json"))
                    manifest["format"] += damage == "format"
                    archive.writestr("manifest.json", json.dumps(manifest))
                    archive.writestr("keys", good.read("keys")[: -10 if damage == "key" else None])
            refused = backup("load", bad, *at, "--replace")
            assert refused.returncode == 1 and "Fix:" in refused.stderr
            assert str(bad) in refused.stderr, refused.stderr
        assert runner.run(restored(other.url)) == before
        runner.run(other.stop())


def test_an_empty_redis_and_a_folder_that_is_no_coordinators_are_refused(redis_url: str, tmp_path: Path) -> None:
    file, stack = tmp_path / "backup", tmp_path / "stack"
    (stack / "coordinator" / "redis").mkdir(parents=True)
    with_store(redis_url, lambda store: store.connection.do("FLUSHALL"))
    empty = backup("save", file, "--redis-url", redis_url)
    assert empty.returncode == 1 and "there is nothing to save" in empty.stderr
    for folder in (stack, tmp_path / "none"):  # of `millrace up --state stack` the coordinator's is below it
        wrong = backup("save", file, "--state-dir", folder)
        assert wrong.returncode == 1 and f"{folder} is not the folder of a coordinator" in wrong.stderr
    assert not file.exists() and not (tmp_path / "none").exists() and sorted(stack.iterdir()) == [stack / "coordinator"]
