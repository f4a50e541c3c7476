"""What is asked of a job between two looks of its loop: whatever comes first or last, a cancellation is carried out."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.drops import DropReason
from millrace.errors import InvalidState
from millrace.events import JobMoved
from millrace.rest import JobState
from services.coordinator.jobs.control import Control
from services.coordinator.jobs.output_folders import OutputFolders, output_mistakes
from services.coordinator.observe.events import Events
from services.coordinator.stages.run import Cancelled, Run
from services.coordinator.state.bell import Bell
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from services.coordinator.store.index import WRITING
from tests.services.coordinator.redis import a_job, lead, queued, with_store

JOB = a_job()


class Desk:
    """A job in `state`, what people ask of it, and its loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.bell = Bell()
        self.control = Control(store, Events(store), self.bell, lambda job: None)
        self.loop: Any = SimpleNamespace(
            job=JOB, components=SimpleNamespace(store=store, events=Events(store), control=self.bell)
        )

    async def job(self) -> JobRecord:
        return await self.store.jobs.get(JOB.id)

    async def heed(self) -> None:
        """The loop looks what was asked."""
        await Run.heed(self.loop)

    def once_read(self, name: str, then: Callable[[], Awaitable[Any]]) -> None:
        """`then` comes in between the store's next answer to `name` and what its reader does with it."""
        read = getattr(self.store.jobs, name)

        async def read_and_then(*arguments: Any) -> Any:
            setattr(self.store.jobs, name, read)
            found = await read(*arguments)
            await then()
            return found

        setattr(self.store.jobs, name, read_and_then)


def at_the_desk(
    url: str, scenario: Callable[[Desk], Awaitable[None]], state: JobState = JobState.RUNNING, **fields: Any
) -> None:
    async def run(store: Store) -> None:
        await lead(store)
        await store.jobs.create(JOB)
        await store.jobs.update(JOB.id, state=state, **fields)
        await scenario(Desk(store))

    with_store(url, run)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.PAUSED])
@pytest.mark.parametrize("asked", ["pause", "resume"])
def test_nothing_else_is_asked_of_a_job_that_is_to_be_cancelled(asked: str, state: JobState, redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.control.cancel(JOB.id)
        with pytest.raises(InvalidState, match=f"{JOB.id} is {state} and about to be cancelled") as refused:
            await getattr(desk.control, asked)(JOB.id)
        assert refused.value.fix.startswith("wait until it has ended")
        assert ((await desk.control.cancel(JOB.id)).state, (await desk.job()).wanted) == (state, "cancel")
        with pytest.raises(Cancelled):
            await desk.heed()

    at_the_desk(redis_url, scenario, state)


@pytest.mark.parametrize(
    ("asked", "state", "wanted"),
    [
        ("pause", JobState.RUNNING, ""),
        ("resume", JobState.RUNNING, "pause"),
        ("resume", JobState.PAUSED, ""),
    ],
)
def test_a_cancellation_that_comes_while_something_else_is_asked_stays(
    asked: str, state: JobState, wanted: str, redis_url: str
) -> None:
    async def scenario(desk: Desk) -> None:
        desk.once_read("get", lambda: desk.control.cancel(JOB.id))
        with pytest.raises(InvalidState, match="about to be cancelled"):
            await getattr(desk.control, asked)(JOB.id)
        assert ((await desk.job()).state, (await desk.job()).wanted) == (state, "cancel")

    at_the_desk(redis_url, scenario, state, wanted=wanted)


def test_a_cancellation_that_comes_while_the_loop_pauses_is_carried_out(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.once_read("wanted", lambda: desk.control.cancel(JOB.id))
        with pytest.raises(Cancelled):
            await desk.heed()
        assert (await desk.job()).state is JobState.RUNNING

    at_the_desk(redis_url, scenario, wanted="pause")


def test_a_pause_that_is_taken_back_while_the_loop_pauses_is_none(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.once_read("wanted", lambda: desk.control.resume(JOB.id))
        await desk.heed()
        assert ((await desk.job()).state, (await desk.job()).wanted) == (JobState.RUNNING, "")

    at_the_desk(redis_url, scenario, wanted="pause")


def test_a_job_that_pauses_while_the_pause_is_taken_back_runs_again(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        async def pauses() -> None:
            await desk.store.jobs.move(JOB.id, JobState.PAUSED, "paused", pending="pause", wanted="")

        desk.once_read("get", pauses)
        job = await desk.control.resume(JOB.id)
        assert (job.state, job.wanted) == (JobState.RUNNING, "")

    at_the_desk(redis_url, scenario, wanted="pause")


def test_a_job_that_starts_while_it_is_cancelled_is_cancelled(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.once_read("get", lambda: desk.store.jobs.move(JOB.id, JobState.STARTING, "starting"))
        job = await desk.control.cancel(JOB.id)
        assert (job.state, job.wanted) == (JobState.STARTING, "cancel")

    at_the_desk(redis_url, scenario, JobState.QUEUED)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_an_ended_job_is_queued_again_with_nothing_left_of_its_end(state: JobState, redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        job = await desk.control.resume(JOB.id)
        assert (job.state, job.step, job.failure, job.wanted) == (JobState.QUEUED, 5, None, "")
        assert (job.finished_s, job.report, job.checkpoint) == (None, None, "/out/checkpoints/step-4")
        told = (await desk.store.records(JOB.id).events())[-1]
        assert told.data == JobMoved(state=JobState.QUEUED)
        assert "continues after step 5, or from its checkpoint of step 4 if" in told.message
        with pytest.raises(InvalidState, match=f"{JOB.id} is queued and cannot be resumed"):
            await desk.control.resume(JOB.id)

    left = {"failure": "why", "wanted": "cancel", "finished_s": 9.0, "report": "/out/report.md"}
    reached = {"step": 5, "version": 5, "checkpoint": "/out/checkpoints/step-4", "checkpoint_step": 4}
    at_the_desk(redis_url, scenario, state, **left, **reached)


def test_two_who_continue_a_job_queue_it_once(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.once_read("get", lambda: desk.control.resume(JOB.id))
        with pytest.raises(InvalidState, match=f"{JOB.id} is queued"):
            await desk.control.resume(JOB.id)
        assert len(await desk.store.records(JOB.id).events()) == 2

    at_the_desk(redis_url, scenario, JobState.FAILED)


def test_a_job_that_has_succeeded_is_not_continued(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        with pytest.raises(InvalidState, match=f"{JOB.id} is succeeded and cannot be resumed") as refused:
            await desk.control.resume(JOB.id)
        assert refused.value.fix == "it has trained all of its steps; submit a new job."

    at_the_desk(redis_url, scenario, JobState.SUCCEEDED)


def test_a_continued_job_that_is_cancelled_before_it_starts_stays_settled(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        prompts = desk.store.prompts(JOB.id)
        await prompts.issue([queued(f"0-{n}") for n in range(4)], 1, (0, 4))
        await prompts.close(1, DropReason.JOB_FAILED)
        await desk.control.resume(JOB.id)
        assert (await desk.control.cancel(JOB.id)).state is JobState.CANCELLED
        view = await prompts.view()
        assert (view.issued, view.dropped, view.reasons) == (4, 4, {DropReason.JOB_FAILED: 4})
        await desk.control.resume(JOB.id)
        await desk.store.jobs.move(JOB.id, JobState.STARTING, "starting")
        assert await prompts.undo()
        view = await prompts.view()
        assert (view.issued, view.queued, view.dropped, view.reasons) == (4, 4, 0, {})

    at_the_desk(redis_url, scenario, JobState.FAILED)


def test_a_job_is_not_continued_over_the_checkpoints_of_another(redis_url: str, tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        other = replace(a_job(2), spec_json=JOB.spec_json)
        await desk.store.jobs.create(other)
        saved = tmp_path / "step-6"
        saved.mkdir()
        await desk.store.jobs.update(other.id, state=JobState.SUCCEEDED, checkpoint=str(saved))
        with pytest.raises(InvalidState, match=f"{JOB.id} cannot be resumed: .* are those of {other.id}"):
            await desk.control.resume(JOB.id)
        saved.rmdir()
        assert (await desk.control.resume(JOB.id)).state is JobState.QUEUED

    at_the_desk(redis_url, scenario, JobState.FAILED)


def test_the_owner_of_a_folder_is_named_to_its_owner_and_to_nobody_else() -> None:
    running = replace(JOB, state=JobState.RUNNING, user="ann")
    for user, named in (("ann", True), ("fleet", True), ("", True), ("bob", False)):
        (mistake,) = output_mistakes("/out/1", [running], user)
        assert (JOB.id in str(mistake)) is named, mistake
        assert ("a job of another user writes there" in str(mistake)) is not named


def test_an_output_inside_or_around_that_of_a_job_that_has_not_ended_is_refused(redis_url: str) -> None:
    """So is one among the checkpoints of any job: they are deleted one by one. A folder of an ended job may hold
    another's, as that of a job which goes on from its checkpoint."""
    ended, waits = replace(a_job(2), folder="/out/ended"), replace(a_job(3), folder="/out/waits", user="ann")

    async def scenario(desk: Desk) -> None:
        folders = OutputFolders(desk.store.index)

        async def refusal(folder: str, user: str = "ann") -> str:
            return " ".join(map(str, await folders.mistakes(folder, folder, user)))

        await desk.store.jobs.create(ended)
        await desk.store.jobs.move(ended.id, JobState.FAILED, "failed")
        await desk.store.jobs.create(waits)
        assert f"lies inside the output of {waits.id}, which is queued" in await refusal("/out/waits/a/b")
        assert f"lies around the output of {waits.id}" in await refusal("/out")
        assert f"{waits.id} is queued and writes there" in await refusal("/out/waits")
        assert "inside the output of a job of another user" in await refusal("/out/waits/a", "bob")
        assert f"among the checkpoints of {ended.id}" in await refusal("/out/ended/checkpoints/step-4/out", "")
        assert await refusal("/out/waits-2") == await refusal("/out/ended/second") == ""
        await desk.store.jobs.create(replace(a_job(4), folder="/out/ended/second"))
        await desk.store.connection.do("DEL", WRITING)  # as an earlier release has it
        await desk.store.index.complete()
        with pytest.raises(InvalidState, match=f"{ended.id} cannot be resumed: .* lies around"):
            await desk.control.resume(ended.id)

    at_the_desk(redis_url, scenario)
