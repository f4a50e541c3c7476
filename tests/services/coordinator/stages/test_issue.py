"""From rows to prompts that can be leased."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.contracts.v1 import work_pb2
from millrace.data import Reading, open_source
from millrace.data.row import PromptRow, write_rows
from millrace.drops import DropReason
from millrace.errors import MillraceError
from millrace.ids import JobId, MemberId, Purpose, training_prompt
from millrace.spec import parse
from services.coordinator.stages.issue import draft, issue
from services.coordinator.stages.run import Cancelled, Run
from services.coordinator.state.bell import Bell
from services.coordinator.state.job import Wanted
from services.coordinator.state.lease import DroppedPrompt, QueuedPrompt
from services.coordinator.store import Store, Superseded
from tests.services.coordinator.redis import a_job, lead, with_store

DEEP = json.loads("[" * 800 + "]" * 800)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_source": "sums \ud83d"}, "half a character"),
        ({"prompt": "1 + 1 \ud83d"}, "half a character"),
        ({"prompt": [{"role": "user", "content": "\ud83d 1 + 1"}]}, "half a character"),
        ({"reward_model": {"ground_truth": ["2", "\ud83d"]}}, "half a character"),
        ({"extra_info": {"\ud83d": 1}}, "half a character"),
        ({"extra_info": {"deep": DEEP}}, "nested too deeply"),
    ],
)
def test_a_row_that_no_lease_can_carry_is_a_bad_one(changes: dict, reason: str, tmp_path: Path) -> None:
    good = {"data_source": "sums \U0001f642", "prompt": "1 + 1", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, good | changes)))
    source = open_source([tmp_path / "a.jsonl"])
    made = [
        draft(JobId("job-1"), source, training_prompt(0, row), Purpose.TRAIN, work_pb2.Sampling(samples=2))
        for row in range(2)
    ]
    good_one, bad_one = made
    assert isinstance(good_one, QueuedPrompt) and good_one.lease.data_source == "sums \U0001f642"
    assert (
        QueuedPrompt.decode([part.encode() if isinstance(part, str) else part for part in good_one.encode()])
        == good_one
    )
    assert isinstance(bad_one, DroppedPrompt) and bad_one.drop.reason is DropReason.BAD_ROW
    detail = bad_one.drop.detail
    assert ("row 1 " in detail or "line 2: " in detail) and reason in detail and "Fix:" in detail and detail.isascii()


async def a_run(store: Store, folder: Path, prompts_per_step: int = 4) -> Run:
    """With 8 rows of data, and two steps' prompts to issue."""
    write_rows(folder / "train.jsonl", [PromptRow(n, "sums", f"{n} + 1", ground_truth=str(n + 1)) for n in range(8)])
    tree = {"name": "sums", "output": "/out", "model": {"path": "/model"}}
    tree |= {"data": {"files": [str(folder / "train.jsonl")]}}
    tree |= {"schedule": {"steps": 2, "prompts_per_step": prompts_per_step, "max_staleness": 1}}
    job = dataclasses.replace(a_job(), spec_json=parse(tree).model_dump_json())
    await lead(store)
    await store.jobs.create(job)
    names = dict.fromkeys(("fleet", "trainer", "publisher", "events"), SimpleNamespace(bell=Bell()))
    components: Any = SimpleNamespace(store=store, queue=SimpleNamespace(issued=Bell()), **names)
    return Run(job, components, open_source([folder / "train.jsonl"]), None)


def test_prompts_whose_issue_was_answered_to_nobody_are_issued_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between Redis's work and its answer, and the command is made again."""

    async def scenario(store: Store) -> None:
        run, do = await a_run(store, tmp_path), store.connection.run

        async def run_twice(*arguments: Any) -> Any:
            await do(*arguments)
            return await do(*arguments)

        monkeypatch.setattr(store.connection, "run", run_twice)
        await issue(run)
        counts = await run.prompts.counts()
        assert (counts.issued, counts.queued, run.job.cursor) == (8, 8, 8)

    with_store(redis_url, scenario)


def test_a_cancel_is_heeded_between_two_commands(redis_url: str, tmp_path: Path) -> None:
    """One command issues at most the 8 rows of a pass, so 1,000 prompts take 125 commands."""

    async def scenario(store: Store) -> None:
        run = await a_run(store, tmp_path, prompts_per_step=500)
        await store.jobs.update(run.job.id, wanted=Wanted.CANCEL)
        with pytest.raises(Cancelled):
            await issue(run)
        assert (await run.prompts.counts()).issued == 8

    with_store(redis_url, scenario)


@pytest.mark.parametrize("superseded", [False, True])
def test_a_cursor_that_another_moved_is_nobodys_to_go_on_from(superseded: bool, redis_url: str, tmp_path: Path) -> None:
    """Of two coordinators the newer one works: the job is not its predecessor's to fail."""

    async def scenario(store: Store) -> None:
        run, other = await a_run(store, tmp_path), Store(redis_url)
        if superseded:
            await lead(other)
        await other.jobs.update(run.job.id, cursor=4)
        await other.close()
        with pytest.raises(Superseded if superseded else MillraceError, match="another coordinator") as refused:
            await issue(run)
        assert isinstance(refused.value, Superseded) is superseded
        assert (await run.prompts.counts()).issued == 0

    with_store(redis_url, scenario)


def test_large_prompts_are_issued_and_leased_a_few_at_a_time(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command holds no more than some of them, and each is issued and leased once."""
    file, member = bytes(1000), MemberId("rollout-a")
    monkeypatch.setattr("services.coordinator.stages.issue.MOST_BYTES", 2500)
    monkeypatch.setattr("services.coordinator.store.prompts.LEASED_BYTES", 4000)

    async def scenario(store: Store) -> None:
        run = await a_run(store, tmp_path)
        shown = [{"role": "user", "content": [{"type": "image"}]}]
        rows = [PromptRow(n, "sums", shown, ground_truth=str(n), images=(file,)) for n in range(8)]
        path = write_rows(tmp_path / "images.jsonl", rows)
        run.source = open_source([path], reading=Reading(most_images=1))
        sizes, do = list[int](), store.connection.run

        async def counted(name: str, keys: Any, arguments: Any) -> Any:
            if name == "issue":
                sizes.append(sum(isinstance(each, bytes) for each in arguments))
            return await do(name, keys, arguments)

        monkeypatch.setattr(store.connection, "run", counted)
        await issue(run)
        assert sizes == [3, 3, 2] and (await run.prompts.counts()).queued == 8
        leased = []
        while claims := await run.prompts.lease(member, 8, run.job.lineage):
            leased.append([claim.row.lease.images[0] for claim in claims])
        assert [len(files) for files in leased] == [4, 4] and all(each == file for files in leased for each in files)

    with_store(redis_url, scenario)
