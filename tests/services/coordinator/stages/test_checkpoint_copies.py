"""Copies of checkpoints in object stores: a folder as a stand-in, and S3 by a server of its API."""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.rest import JobState
from millrace.validation.places import ALLOWED, check_store
from services.coordinator.stages.checkpoint_copies import MANIFEST, Copies, CopyFailed
from tests.services.coordinator.cluster import around, until
from tests.services.coordinator.conftest import running

JOB = "job-000000000001"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with an empty bucket."""
    server_of = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket="checkpoints")
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        url = f"file://{tmp_path}/store"
    else:
        url = f"s3://checkpoints/{tmp_path.name}"
        environment = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**environment, "AWS_ENDPOINT_URL": request.getfixturevalue("s3")}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv(ALLOWED, url)
    return url


def a_checkpoint(folder: Path, step: int = 3) -> Path:
    made = folder / "checkpoints" / f"step-{step}"
    (made / "state").mkdir(parents=True)
    (made / "trainer.json").write_text('{"version": 3}')
    (made / "state" / "rank-0.safetensors").write_bytes(bytes(range(256)) * 40_000)  # more than two chunks
    (made / "state" / "empty").touch()
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_is_fetched(store: str, tmp_path: Path) -> None:
    folder, copies = a_checkpoint(tmp_path), Copies(store, JOB)
    assert not copies.is_complete(3)
    assert copies.write(3, folder, threading.Event()) == sum(map(len, content(folder).values()))
    before = content(folder)
    shutil.rmtree(folder.parent)
    again = Copies(store, JOB)  # as another coordinator sees it
    assert again.is_complete(3) and not again.is_complete(4) and not Copies(store, "job-2").is_complete(3)
    again.fetch(3, folder)
    assert content(folder) == before and [path.name for path in folder.parent.iterdir()] == ["step-3"]
    again.remove(3)
    again.remove(3)
    assert not copies.is_complete(3)
    with pytest.raises(CopyFailed, match="cannot be read"):
        copies.fetch(3, tmp_path / "other")


def test_a_copy_without_its_manifest_is_none(store: str, tmp_path: Path) -> None:
    folder, copies, stopped = a_checkpoint(tmp_path), Copies(store, JOB), threading.Event()
    stopped.set()
    with pytest.raises(CopyFailed, match="was not finished"):
        copies.write(3, folder, stopped)
    copies._put(folder / "trainer.json", copies._at(3, "left-over"))
    assert not copies.is_complete(3)
    copies.write(3, folder, threading.Event())
    assert copies.is_complete(3) and not copies._files.exists(copies._at(3, "left-over"))


def test_a_damaged_copy_is_refused(store: str, tmp_path: Path) -> None:
    folder, copies = a_checkpoint(tmp_path), Copies(store, JOB)
    copies.write(3, folder, threading.Event())
    copies._files.pipe_file(copies._at(3, "trainer.json"), b'{"version": 4}')
    with pytest.raises(CopyFailed, match=r"trainer\.json is damaged"):
        copies.fetch(3, tmp_path / "fetched")
    manifest = json.loads(copies._files.cat_file(copies._at(3, MANIFEST)))
    manifest["files"][0]["name"] = "../../outside"
    copies._files.pipe_file(copies._at(3, MANIFEST), json.dumps(manifest).encode())
    with pytest.raises(CopyFailed, match="manifest"):
        copies.fetch(3, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://other/team", "outside the stores"),
        ("s3://bucket/teams", "outside the stores"),
        ("s3://bucket/team/../other", "not plain"),
        ("http://bucket/team", "no URL of an object store"),
        ("simplecache::s3://bucket/team", "no URL of an object store"),
        ("/mnt/archive", "no URL of an object store"),
        ("s3://key:secret@bucket/team", "no URL of an object store"),
        ("s3://bucket/team?endpoint=x", "no URL of an object store"),
    ],
)
def test_stores_that_a_job_may_not_name(url: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "s3://bucket/team/, file:///mnt")
    with pytest.raises(InvalidJob, match=why):
        check_store(url)
    monkeypatch.delenv(ALLOWED)
    with pytest.raises(InvalidJob, match=f"have an operator name some in {ALLOWED}"):
        check_store("s3://bucket/team/1")


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs"), ("az://b/x", "adlfs")]
)
def test_a_missing_package_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, url)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidJob, match=f"needs the package {package}.*install {package}"):
        check_store(url)


@pytest.mark.slow
def test_a_job_goes_on_from_a_copy(tmp_path: Path, spec: dict[str, Any]) -> None:
    output, store = Path(spec["output"]), tmp_path / "store"
    spec["schedule"] |= {"save_every_steps": 1, "keep_checkpoints": 2, "checkpoint_store": f"file://{store}"}

    async def play(process: Any) -> None:
        async with around(process) as cluster:
            trainer, _ = await cluster.trainer(), await cluster.replica()
            held = asyncio.Event()

            async def hold(_: object) -> None:
                await held.wait()

            job_id = await cluster.submit(spec)
            await cluster.reached(job_id, 3)
            trainer.faults["Step"] = hold
            await asyncio.to_thread(process.client.cancel, job_id)
            held.set()
            job = await cluster.ended(job_id)
            assert job.state is JobState.CANCELLED and job.checkpoint is not None
            newest = Path(job.checkpoint).name
            copied = await until(
                lambda: cluster.events(job_id, "checkpoint.copied"),
                lambda found: any(event.data.url.endswith(newest) for event in found),
            )
            assert copied[-1].data.bytes > 0 and (store / job_id / newest / MANIFEST).exists()
            await trainer.leave()
            cluster.members.remove(trainer)
            shutil.rmtree(output / "checkpoints")
            again = await cluster.trainer()
            await asyncio.to_thread(process.client.resume, job_id)
            job = await cluster.ended(job_id)
            assert (job.state, job.step) == (JobState.SUCCEEDED, 6) and again.configured[0].endswith(newest)
            kept = sorted(path.name for path in (store / job_id).iterdir())
            assert kept[-1] == "step-6" and len(kept) <= 2
            assert (store / job_id / "step-6" / MANIFEST).exists()
            gone = await asyncio.to_thread(lambda: process.client.delete(job_id, checkpoints=True))
            assert gone.checkpoints and not list((store / job_id).iterdir())

    with running(tmp_path / "coordinator", environment={ALLOWED: f"file://{store}"}) as process:
        asyncio.run(play(process))
