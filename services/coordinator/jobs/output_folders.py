"""Output folders of jobs: no job writes where another one writes, or over the checkpoints of another."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from millrace.admission.submission import left_checkpoints
from millrace.errors import InvalidState, Mistake, wrong_value
from millrace.rest import JobState
from millrace.rest.users import FLEET
from services.coordinator.state.job import ENDED, JobRecord
from services.coordinator.store.index import JobIndex

ANOTHERS = "a job of another user"
ANOTHER_FOLDER = "give another folder ({id} in its path makes one for each job)"
SUBMIT = "submit a new job with another folder."


def _may_know(job: JobRecord, user: str) -> bool:
    """Whether `user` may know of the job: its own user, the fleet, and callers without a user."""
    return user in ("", FLEET, job.user)


def _writes(job: JobRecord, user: str) -> str:
    """Says to `user` that the job, which has not ended, writes to its output."""
    return f"{job.id} is {job.state} and writes" if _may_know(job, user) else f"{ANOTHERS} writes"


class OutputFolders:
    """The output folders of all jobs. They are compared without symbolic links."""

    def __init__(self, index: JobIndex) -> None:
        self._index = index

    async def mistakes(self, output: str, folder: str, user: str) -> list[Mistake]:
        """Why a new job of `user` cannot have `output`, which is `folder` without symbolic links; empty if it can."""
        nested = await self._nested(folder, user)
        if nested is not None:
            return [wrong_value("output", output, nested, f"{ANOTHER_FOLDER}.")]
        users = await self._index.with_output(folder)
        return await asyncio.to_thread(lambda: list(output_mistakes(output, users, user)))

    async def check_free_for(self, job: JobRecord) -> None:
        """Raises InvalidState if a job that ended cannot continue: by now another one writes in its output, or has left
        checkpoints there."""
        if nested := await self._nested(job.folder, job.user):
            raise InvalidState(f"{job.id} cannot be resumed: its output, {job.output}, {nested}.", SUBMIT)
        await asyncio.to_thread(check_checkpoints, job, await self._index.with_output(job.folder))

    async def _nested(self, folder: str, user: str) -> str | None:
        """What is wrong with a folder inside or around that of another job which has not ended, or among the
        checkpoints of any job, as those are deleted when there are newer ones."""
        around, inside = await self._index.around(folder), await self._index.inside(folder)
        if (other := around or inside) is not None:
            whose = f"{other.id}, which is {other.state}" if _may_know(other, user) else ANOTHERS
            return f"lies {'inside' if around else 'around'} the output of {whose}"
        for place in (Path(folder), *Path(folder).parents):
            for job in await self._index.with_output(str(place.parent)) if place.name == "checkpoints" else ():
                return f"lies among the checkpoints of {job.id if _may_know(job, user) else ANOTHERS}"
        return None


def output_mistakes(output: str, users: Sequence[JobRecord], user: str) -> Iterator[Mistake]:
    """One if one of the `users`, the jobs with this output, writes there, or left checkpoints there. `user` reads
    it."""
    for job in users:
        if job.state not in ENDED:
            yield wrong_value("output", output, f"{_writes(job, user)} there", f"{ANOTHER_FOLDER}.")
            return
    resume = users and users[-1].state is not JobState.SUCCEEDED and _may_know(users[-1], user)
    others = [f"continue {users[-1].name} with `millrace resume {users[-1].id}`"] if resume else []
    yield from left_checkpoints(output, others)


def check_checkpoints(job: JobRecord, users: Sequence[JobRecord]) -> None:
    """Raises InvalidState if another of the `users`, the jobs with the output of `job`, writes there by now, or left
    checkpoints there."""
    for other in users:
        if other.id == job.id:
            continue
        if other.state not in ENDED:
            what = f"{job.id} cannot be resumed: {_writes(other, job.user)} to its output, {job.output}."
            raise InvalidState(what, SUBMIT)
        if other.checkpoint and Path(other.checkpoint).is_dir():
            owner = other.id if _may_know(other, job.user) else ANOTHERS
            what = f"{job.id} cannot be resumed: the checkpoints in its output, {job.output}, are those of {owner}."
            raise InvalidState(what, SUBMIT)
