"""Deletes jobs that ended long ago, so that Redis does not grow with every job that was ever run."""

import asyncio

import structlog

from services.coordinator.store import Store, StoreDown

log = structlog.get_logger(__name__)
EVERY_S = 60.0


async def expire_jobs(store: Store, keep: int) -> None:
    """Keeps the last `keep` jobs that ended, and deletes those before them, until cancelled."""
    while True:
        try:
            await delete_finished(store, keep)
        except StoreDown:
            await store.connection.wait_until_up()
        await asyncio.sleep(EVERY_S)


async def delete_finished(store: Store, keep: int) -> int:
    """Deletes all but the last `keep` jobs that ended, with everything that Redis holds of them; their output folders
    stay as they are. Answers how many were deleted. Raises StoreDown."""
    deleted = 0
    while ids := await store.index.finished_beyond(keep):
        for job_id in ids:
            deleted += await store.index.delete(job_id)
    if deleted:
        log.info("old jobs were deleted", jobs=deleted, kept=keep)
    return deleted
