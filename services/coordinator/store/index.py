"""The index of jobs in Redis: lists and pages without their specs, and the jobs that have ended long ago."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import structlog

from millrace.ids import JobId, Purpose
from millrace.rest import JobState
from services.coordinator.state.job import ACTIVE, JobRecord
from services.coordinator.store import members as deaths
from services.coordinator.store import prompts, records
from services.coordinator.store.connection import Connection, text
from services.coordinator.store.jobs import key, record

log = structlog.get_logger(__name__)
ALL = "millrace:jobs"
FINISHED = "millrace:finished"
OUTPUT = "millrace:output:"
WRITING = "millrace:writing"
"""The output folders of the jobs that have not ended: see index.lua."""
REPORTED = "millrace:reported_until"
FIELDS = tuple(name for name in JobRecord.__dataclass_fields__ if name != "spec_json")
"""Fields of the jobs in a list."""
FOR_TURNS = (
    "id",
    "name",
    "state",
    "created_s",
    "user",
    "partition",
    "wanted_partition",
    "priority",
    "preempt",
    "share",
    "pools",
    "since_s",
    "step",
    "started_step",
)
"""Fields on which it depends which job runs where."""
LOOKED_AT_ONCE = 500
AT_ONCE = 100
"""Jobs that one command reads, indexes or looks up."""


@dataclass(frozen=True)
class Page:
    """One page of the list of jobs, the newest first. The jobs are without their specs."""

    jobs: list[JobRecord]
    next: str | None
    """The cursor of the page that follows; None on the last page."""
    total: int
    """Jobs on all pages."""


class JobIndex:
    """Which jobs there are. The scripts that create, move and delete jobs keep it (index.lua)."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def chosen(
        self, wanted: Callable[[JobRecord], bool], limit: int, state: JobState | None = None, cursor: str = ""
    ) -> Page:
        """A page of the jobs that are wanted, as `page` gives it. All jobs are read."""
        found, page = list[JobRecord](), await self.page(LOOKED_AT_ONCE, state)
        while True:
            found += [job for job in page.jobs if wanted(job)]
            if page.next is None:
                break
            page = await self.page(LOOKED_AT_ONCE, state, page.next)
        left = [job for job in found if not cursor or job.created_s < float(cursor)]
        return Page(left[:limit], repr(left[limit - 1].created_s) if len(left) > limit else None, len(found))

    async def page(self, limit: int, state: JobState | None = None, cursor: str = "") -> Page:
        """Up to `limit` jobs, all or those in `state`, the newest first. `cursor` is `next` of the page before."""
        name = _of_state(state) if state else ALL
        start = f"({cursor}" if cursor else "+inf"
        wanted = ("ZRANGE", name, start, "-inf", "BYSCORE", "REV", "LIMIT", 0, limit + 1, "WITHSCORES")
        found, total = await self._redis.together(wanted, ("ZCARD", name))
        more = len(found) > 2 * limit
        jobs = await self.without_specs([text(i) for i in found[: 2 * limit : 2]])
        return Page(jobs, text(found[2 * limit - 1]) if more else None, total)

    async def without_specs(self, ids: Sequence[str]) -> list[JobRecord]:
        """The jobs that exist of these, without their specs."""
        return await self._read(ids, FIELDS)

    async def _read(self, ids: Sequence[str], fields: Sequence[str]) -> list[JobRecord]:
        """The jobs that exist of these, with these fields; the id is the first of them."""
        found, names = list[Any](), [name.encode() for name in fields]
        for first in range(0, len(ids), AT_ONCE):
            found += await self._redis.together(
                *(("HMGET", key(job_id), *fields) for job_id in ids[first : first + AT_ONCE])
            )
        return [record(dict(zip(names, values, strict=True))) for values in found if values[0]]

    async def counts(self) -> dict[JobState, int]:
        """The number of jobs in each state."""
        found = await self._redis.together(*(("ZCARD", _of_state(state)) for state in JobState))
        return dict(zip(JobState, found, strict=True))

    async def active(self) -> list[JobRecord]:
        """The jobs that have a trainer, as far as their turn depends on it: those first that were submitted first."""
        return await self._for_turns(*ACTIVE)

    async def queued(self) -> list[JobRecord]:
        """The jobs in the queue, as far as their turn depends on it: those first that were submitted first."""
        return await self._for_turns(JobState.QUEUED)

    async def _for_turns(self, *states: JobState) -> list[JobRecord]:
        found = await self._redis.together(*(("ZRANGE", _of_state(state), 0, -1) for state in states))
        jobs = await self._read([text(i) for ids in found for i in ids], FOR_TURNS)
        return sorted((job for job in jobs if job.state in states), key=lambda job: job.created_s)

    async def in_state(self, state: JobState, limit: int) -> list[JobId]:
        """Up to `limit` jobs in `state`, the newest first."""
        return [JobId(text(i)) for i in await self._redis.do("ZRANGE", _of_state(state), 0, limit - 1, "REV")]

    async def with_output(self, folder: str) -> list[JobRecord]:
        """The jobs whose output is `folder`, a path without symbolic links; the oldest first."""
        ids = await self._redis.do("ZRANGE", f"{OUTPUT}{folder}", 0, -1)
        found = await self._redis.together(*(("HGETALL", key(text(i))) for i in ids)) if ids else []
        return [record(fields) for fields in found if fields]

    async def around(self, folder: str) -> JobRecord | None:
        """A job that has not ended and whose output lies around `folder`, a path without symbolic links."""
        return await self._writing(*((f"[{each}\0", f"({each}\1") for each in PurePath(folder).parents))

    async def inside(self, folder: str) -> JobRecord | None:
        """A job that has not ended and whose output lies inside `folder`, a path without symbolic links."""
        below = folder.rstrip("/")
        return await self._writing((f"[{below}/", f"({below}{chr(ord('/') + 1)}"))

    async def _writing(self, *ranges: tuple[str, str]) -> JobRecord | None:
        """The first job in one of these ranges of WRITING, without its spec."""
        if not ranges:
            return None
        wanted = (("ZRANGE", WRITING, *bounds, "BYLEX", "LIMIT", 0, 1) for bounds in ranges)
        found = [text(each[0]).rsplit("\0", 1)[1] for each in await self._redis.together(*wanted) if each]
        return next(iter(await self.without_specs(found)), None)

    # Jobs that have ended.

    async def finished_since(self, since_s: float, limit: int) -> list[JobId]:
        """Up to `limit` jobs that ended after the Unix time `since_s`, the last one first."""
        found = await self._redis.do("ZRANGE", FINISHED, "+inf", since_s, "BYSCORE", "REV", "LIMIT", 0, limit)
        return [JobId(text(i)) for i in found]

    async def ended_after(self, time_s: float, limit: int) -> list[tuple[JobId, float]]:
        """Up to `limit` jobs that ended after this Unix time, each with that of its end, the first one first."""
        asked = ("ZRANGE", FINISHED, f"({time_s!r}", "+inf", "BYSCORE", "LIMIT", 0, limit, "WITHSCORES")
        found = [text(each) for each in await self._redis.do(*asked)]
        return [(JobId(job_id), float(at)) for job_id, at in zip(found[::2], found[1::2], strict=True)]

    async def reported_until(self) -> float | None:
        """Unix time until which ends of jobs were reported by webhooks; None if that never began."""
        found = await self._redis.do("GET", REPORTED)
        return None if found is None else float(text(found))

    async def set_reported_until(self, time_s: float) -> None:
        await self._redis.do("SET", REPORTED, repr(time_s))

    async def finished_beyond(self, keep: int, skip: int = 0) -> list[JobId]:
        """Some of the jobs that ended before the last `keep` that did; the longest ago first, `skip` of them more."""
        excess = int(await self._redis.do("ZCARD", FINISHED)) - keep
        if excess <= 0:
            return []
        return [JobId(text(i)) for i in await self._redis.do("ZRANGE", FINISHED, 0, min(excess, AT_ONCE + skip) - 1)]

    async def finished_before(self, time_s: float, skip: int = 0) -> list[JobId]:
        """Some of the jobs that ended before this Unix time; `skip` as in `finished_beyond`."""
        asked = ("ZRANGE", FINISHED, "-inf", f"({time_s!r}", "BYSCORE", "LIMIT", 0, AT_ONCE + skip)
        return [JobId(text(i)) for i in await self._redis.do(*asked)]

    async def delete(self, job_id: JobId) -> bool:
        """Deletes a job that has ended, with everything stored for it. False if it was resumed or is gone."""
        ledgers = [f"{key(job_id)}:{purpose}:{part}" for purpose in Purpose for part in prompts.PARTS]
        owned = [*(f"{key(job_id)}:{part}" for part in (*records.PARTS, *deaths.PARTS)), *ledgers]
        return bool(await self._redis.run("delete_job", [key(job_id), *owned], [job_id]))

    # Jobs of an earlier release.

    async def complete(self) -> None:
        """Adds the jobs that a release without an index, or without a part of it, has stored. May be interrupted and
        repeated."""
        (known, writing), counts = await self._redis.together(("ZCARD", ALL), ("ZCARD", WRITING)), await self.counts()
        if known == sum(counts.values()) and writing == sum(counts[each] for each in (JobState.QUEUED, *ACTIVE)):
            return
        ids = [text(i) for i in await self._redis.do("ZRANGE", ALL, 0, -1)]
        for first in range(0, len(ids), AT_ONCE):
            part = ids[first : first + AT_ONCE]
            found = await self._redis.together(*(("HMGET", key(i), "spec_json", "folder") for i in part))
            for job_id, (spec, folder) in zip(part, found, strict=True):
                if spec:
                    output = text(folder) or await asyncio.to_thread(os.path.realpath, json.loads(spec)["output"])
                    await self._redis.run("index_job", [key(job_id)], [job_id, output])
        log.info("the index of jobs is complete", jobs=len(ids))


def _of_state(state: JobState) -> str:
    return f"{ALL}:{state}"
