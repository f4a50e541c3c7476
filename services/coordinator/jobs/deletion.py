"""Deletes jobs that have ended: one that somebody asks for, and those beyond the limits of what is kept."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from millrace.errors import InvalidState, MillraceError, NotFound
from millrace.ids import JobId
from millrace.rest import DeletedView, JobState
from millrace.validation.kinds import leaves
from services.coordinator.stages.checkpoint_copies import remove_copy
from services.coordinator.state.job import ACTIVE, ENDED, JobRecord
from services.coordinator.store import Store, StoreDown

log = structlog.get_logger(__name__)
EVERY_S = 60.0
DAY_S = 86400.0
LOOKED_AT = 10_000
"""Jobs that have not ended and may name the checkpoints of a deleted one."""


@dataclass(frozen=True)
class Retention:
    """What is kept of jobs that have ended."""

    jobs: int
    """Number of jobs that are kept, those that ended last."""
    days: float = 0.0
    """Days for which a job is kept after its end; 0: without limit."""
    delete_checkpoints: bool = False
    """Whether the checkpoints of a job are deleted with it."""


class Deletion:
    """Deletes jobs. `lock` is held meanwhile: a job that is being deleted cannot be resumed."""

    def __init__(self, store: Store, lock: asyncio.Lock) -> None:
        self._store, self._lock = store, lock

    async def delete(self, job_id: str, *, checkpoints: bool = False) -> DeletedView:
        """Deletes everything that Redis holds of a job, and its checkpoints if asked to. Checkpoints go first: if
        one cannot be deleted the job stays, and the call may be repeated.

        Raises NotFound, and InvalidState for a job that has not ended, or whose checkpoints another job needs;
        CopyFailed where a copy in an object store cannot be removed.
        """
        async with self._lock:
            job = await self._store.jobs.get(job_id)
            if job.state not in ENDED:
                what = f"{job_id} is {job.state} and cannot be deleted."
                raise InvalidState(what, f"cancel it first: `millrace cancel {job_id}`.")
            gone = await self._delete_checkpoints(job) if checkpoints else []
            await self._store.index.delete(job.id)
        log.info("a job was deleted", job=job_id, checkpoints=len(gone))
        return DeletedView(id=job.id, name=job.name, checkpoints=gone)

    async def keep_within(self, retention: Retention) -> None:
        """Deletes what is beyond the limits, until cancelled."""
        while True:
            async with self._store.connection.outlasted():
                await self.delete_beyond(retention)
            await asyncio.sleep(EVERY_S)

    async def delete_beyond(self, retention: Retention) -> int:
        """Deletes the jobs beyond the limits. Answers how many. One that cannot be deleted is left until the next time.
        Raises StoreDown."""
        deleted, failed = 0, set[JobId]()
        while ids := [each for each in await self._beyond(retention, len(failed)) if each not in failed]:
            for job_id in ids:
                try:
                    await self.delete(job_id, checkpoints=retention.delete_checkpoints)
                    deleted += 1
                except NotFound:  # the index alone has it
                    if not await self._store.index.delete(job_id):
                        failed.add(job_id)
                except StoreDown:
                    raise
                except MillraceError as error:
                    log.warning("an old job was not deleted", job=job_id, error=str(error))
                    failed.add(job_id)
        return deleted

    async def _beyond(self, retention: Retention, failed: int) -> list[JobId]:
        found = await self._store.index.finished_beyond(retention.jobs, failed)
        if retention.days:
            before_s = time.time() - retention.days * DAY_S
            found += await self._store.index.finished_before(before_s, failed)
        return list(dict.fromkeys(found))

    async def _delete_checkpoints(self, job: JobRecord) -> list[str]:
        """Deletes the folders of all checkpoints that are recorded, and no others. Raises InvalidState."""
        cuts = await self._store.records(job.id).checkpoints()
        paths, store = [str(cut["path"]) for cut in cuts.values()], _store_of(job)
        for step in cuts:
            await remove_copy(store, job.id, step)
        if paths:
            await self._check_unused(job, Path(paths[0]).parent)
        for path in paths:
            try:
                await asyncio.to_thread(shutil.rmtree, path)
            except FileNotFoundError:
                pass
            except OSError as error:
                what = f"{job.id} was not deleted: {path} cannot be removed: {error.strerror or error}."
                raise InvalidState(what, "remove it by hand, or delete the job without its checkpoints.") from error
        if paths:
            await asyncio.to_thread(_tidy, Path(paths[0]).parent)
        return paths

    async def _check_unused(self, job: JobRecord, folder: Path) -> None:
        """Raises InvalidState if a job that has not ended names something in the folder."""
        for state in (JobState.QUEUED, *ACTIVE):
            for other_id in await self._store.index.in_state(state, LOOKED_AT):
                other = await self._store.jobs.get(other_id)
                if any(Path(text).is_relative_to(folder) for text in _texts(json.loads(other.spec_json))):
                    what = (
                        f"{job.id} was not deleted: {other.named_for(job)} is {other.state} and uses its checkpoints."
                    )
                    raise InvalidState(what, "wait until that has ended, or delete the job without its checkpoints.")


def _store_of(job: JobRecord) -> str | None:
    """The object store with copies of the job's checkpoints. The spec may be of another release."""
    return (json.loads(job.spec_json).get("schedule") or {}).get("checkpoint_store")


def _texts(tree: object) -> Iterator[str]:
    """All texts in a job spec."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for _, value in leaves(tree):
            yield from _texts(value) if value != {} else ()
    elif isinstance(tree, list):
        for each in tree:
            yield from _texts(each)


def _tidy(folder: Path) -> None:
    """Removes a link to a checkpoint that is gone, and the folder if it is empty."""
    best = folder / "best"
    try:
        if best.is_symlink() and not best.exists():
            best.unlink()
        folder.rmdir()
    except OSError:
        pass  # something else is in it, or it is gone
