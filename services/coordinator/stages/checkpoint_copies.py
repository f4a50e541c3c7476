"""Copies of checkpoints in an object store: `STORE/JOB/step-N`, with the manifest written last.

Object stores cannot rename, so a copy is complete when its `manifest.json` is there, which names every file with its
size and checksum. The checkpoint on the disk stays the job's; a copy is fetched where that folder is gone.
"""

import asyncio
import contextlib
import hashlib
import json
import posixpath
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import structlog

from millrace import events
from millrace.errors import MillraceError, Unavailable
from millrace.validation.places import check_store
from services.coordinator.stages.run import Run

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = structlog.get_logger(__name__)
MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 4 << 20
LARGEST_MANIFEST = 64 << 20


class CopyFailed(MillraceError):
    """A copy could not be written, read or removed."""


class Copies:
    """The copies of one job's checkpoints. Its calls block; those of a store have the bounds of its client."""

    def __init__(self, store: str, job_id: str) -> None:
        """Raises InvalidJob if the store may not be used here."""
        check_store(store)
        from fsspec.core import url_to_fs

        self.url = f"{store.rstrip('/')}/{job_id}"
        self._files: AbstractFileSystem
        self._files, self._root = url_to_fs(self.url, use_listings_cache=False)

    def is_complete(self, step: int) -> bool:
        """Whether the copy of this step is there. Raises CopyFailed."""
        with _failing(f"{self.url}/step-{step} cannot be looked at"):
            return bool(self._files.exists(self._at(step, MANIFEST)))

    def write(self, step: int, folder: Path, stop: threading.Event) -> int:
        """Copies the folder, the manifest last. Answers the bytes. Raises CopyFailed."""
        with _failing(f"{folder} cannot be copied to {self.url}/step-{step}"):
            self.remove(step)  # what an earlier attempt left
            found = []
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                if stop.is_set():
                    raise CopyFailed(
                        f"{self.url}/step-{step} was not finished: the job's loop ended.", "resume the job."
                    )
                name = path.relative_to(folder).as_posix()
                found.append({"name": name, **self._put(path, self._at(step, name))})
            whole = {"format": FORMAT, "step": step, "written_s": time.time(), "files": found}
            self._files.pipe_file(self._at(step, MANIFEST), json.dumps(whole).encode())
            return sum(each["bytes"] for each in found)

    def fetch(self, step: int, folder: Path) -> None:
        """Makes the folder of a checkpoint from its copy; it gets its name when every file has its checksum. Raises
        CopyFailed."""
        made = folder.with_name(f".{folder.name}.fetched")
        with _failing(f"{self.url}/step-{step} cannot be read"):
            text = self._files.cat_file(self._at(step, MANIFEST), end=LARGEST_MANIFEST)
            shutil.rmtree(made, ignore_errors=True)
            for entry in _entries(json.loads(text)):
                path = made / entry["name"]
                path.parent.mkdir(parents=True, exist_ok=True)
                if self._get(self._at(step, entry["name"]), path) != (entry["bytes"], entry["sha256"]):
                    what = f"{self.url}/step-{step}/{entry['name']} is damaged: it is not what its manifest says."
                    raise CopyFailed(what, "restore it, or continue from another checkpoint.")
            made.rename(folder)

    def remove(self, step: int) -> None:
        """Removes a copy, the manifest first. Raises CopyFailed."""
        with _failing(f"{self.url}/step-{step} cannot be removed"):
            if self._files.exists(self._at(step, MANIFEST)):
                self._files.rm_file(self._at(step, MANIFEST))
            if self._files.exists(self._at(step)):
                self._files.rm(self._at(step), recursive=True)

    def _at(self, step: int, name: str = "") -> str:
        return posixpath.join(self._root, f"step-{step}", name).rstrip("/")

    def _put(self, path: Path, place: str) -> dict[str, Any]:
        """Size and checksum of what was written."""
        self._files.makedirs(posixpath.dirname(place), exist_ok=True)
        with path.open("rb") as source, self._files.open(place, "wb") as target:
            size, checksum = _copied(source, target)
        return {"bytes": size, "sha256": checksum}

    def _get(self, place: str, path: Path) -> tuple[int, str]:
        with self._files.open(place, "rb") as source, path.open("wb") as target:
            return _copied(source, target)


def _copied(source: IO[bytes], target: IO[bytes]) -> tuple[int, str]:
    """Size and checksum of what was copied."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        target.write(chunk)
    return size, digest.hexdigest()


def begin_copy(run: Run) -> None:
    """Begins to copy the newest checkpoint, where the job has a store and that is not there yet. One copy is written
    at a time; a failure is an event, and costs the job nothing."""
    if run.spec.schedule.checkpoint_store is not None:
        run.copying = asyncio.create_task(_copy(run, run.copying))


async def copies_done(run: Run) -> None:
    """Waits for the copies that were begun, at most `deadlines.save_s`."""
    if run.copying is not None:
        await asyncio.wait([run.copying], timeout=run.spec.deadlines.save_s)


async def fetch_missing(run: Run) -> None:
    """Fetches the job's checkpoint where its folder is gone and there is a copy. Raises Unavailable."""
    store, folder = run.spec.schedule.checkpoint_store, run.job.checkpoint
    if store is None or not folder or await asyncio.to_thread(Path(folder).is_dir):
        return
    try:
        async with asyncio.timeout(run.spec.deadlines.save_s):
            copies = await asyncio.to_thread(Copies, store, run.job.id)
            if await asyncio.to_thread(copies.is_complete, run.job.checkpoint_step):
                await asyncio.to_thread(copies.fetch, run.job.checkpoint_step, Path(folder))
                log.info("a checkpoint was fetched", job=run.job.id, step=run.job.checkpoint_step, store=copies.url)
    except TimeoutError as error:
        what = f"the checkpoint of step {run.job.checkpoint_step} was not fetched from {store} in time."
        raise Unavailable(what, "raise deadlines.save_s, or fetch it by hand.") from error


async def remove_copy(store: str | None, job_id: str, step: int) -> None:
    """Removes the copy of a checkpoint, if there is one. Raises CopyFailed, and InvalidJob if the store may not be
    used any more."""
    if store is not None:
        await asyncio.to_thread(lambda: Copies(store, job_id).remove(step))


async def _copy(run: Run, before: "asyncio.Task[None] | None") -> None:
    if before is not None:
        await asyncio.wait([before])
    kept = await run.records.checkpoints()
    step = max(kept, default=-1)
    if step < 0:
        return
    stop, began, store = threading.Event(), time.monotonic(), str(run.spec.schedule.checkpoint_store)
    try:
        copies = await asyncio.to_thread(Copies, store, run.job.id)
        if await asyncio.to_thread(copies.is_complete, step):
            return
        async with asyncio.timeout(run.spec.deadlines.save_s):
            size = await asyncio.to_thread(copies.write, step, Path(kept[step]["path"]), stop)
    except (MillraceError, TimeoutError) as error:
        told = "it took longer than deadlines.save_s" if isinstance(error, TimeoutError) else str(error)
        failed = events.CheckpointCopyFailed(step=step, store=store)
        await run.tell(failed, f"the checkpoint of step {step} was not copied: {told}")
        return
    finally:
        stop.set()  # the thread ends after the file that it copies
    if step not in await run.records.checkpoints():  # meanwhile it was removed
        return await remove_copy(store, run.job.id, step)
    url, seconds = f"{copies.url}/step-{step}", time.monotonic() - began
    copied = events.CheckpointCopied(step=step, url=url, bytes=size, seconds=seconds)
    await run.tell(copied, f"the checkpoint of step {step} was copied to {url}: {size / 1e6:.1f} MB in {seconds:.1f} s")


def _entries(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files that a manifest names. Raises CopyFailed for one of another format, or with paths that lead outside."""
    found: list[dict[str, Any]] = list(manifest["files"])
    names = [PurePosixPath(str(each["name"])) for each in found]
    if manifest["format"] != FORMAT or any(name.is_absolute() or ".." in name.parts for name in names):
        raise CopyFailed("the manifest of the copy is not one of this release.", "use the release that wrote it.")
    return found


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raises CopyFailed for whatever fails: a client of a store raises what it likes."""
    try:
        yield
    except CopyFailed:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        fix = "see whether the store answers and the coordinator may write there."
        raise CopyFailed(f"{what}: {told}.", fix) from error
