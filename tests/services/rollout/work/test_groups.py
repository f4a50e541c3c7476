"""When the episodes of a group are enough, and what a group says of its prompt."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from millrace.contracts.v1 import work_pb2
from millrace.data.chat import Rendered
from millrace.data.pictures import Pictures
from millrace.data.row import PromptRow
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow
from millrace.ids import JobId, MemberId
from services.rollout.engine import Completion, Response, Sampling, StopReason
from services.rollout.episode.episode import Episode, EpisodeFailed, Prompt
from services.rollout.episode.slots import Slots
from services.rollout.scoring.scored import Scored
from services.rollout.work.groups import Ended, GroupGenerator, first_of, single_turn
from services.rollout.work.job import Job
from tests.image_models import picture, save_processor
from tests.services.rollout.jobs import job_spec

FAILURE = Drop(DropReason.ENVIRONMENT_FAILED, "step: raised ValueError")
Play = Callable[[asyncio.Event], Awaitable[Episode]]


async def ends(_: asyncio.Event) -> Episode:
    return Episode(())


async def ends_later(first: asyncio.Event) -> Episode:
    await first.wait()
    return Episode(())


async def fails(_: asyncio.Event) -> Episode:
    raise EpisodeFailed(FAILURE)


async def waits(_: asyncio.Event) -> Episode:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks(_: asyncio.Event) -> Episode:
    raise RuntimeError("a bug")


def gathered(plays: list[Play], enough: int) -> Ended:
    async def scenario() -> Ended:
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, later.set)
        tasks = [asyncio.ensure_future(play(later)) for play in plays]
        try:
            return await first_of(tasks, enough)
        finally:
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [play is waits for play in plays]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("plays", "enough", "episodes", "cancelled", "failed"),
    [
        ([ends, ends_later, ends], 3, 3, 0, 0),
        ([waits, ends_later, ends, waits], 2, 2, 2, 0),
        ([fails, ends_later, ends], 2, 2, 0, 1),
        ([fails, ends, ends_later, waits], 2, 2, 1, 1),
    ],
)
def test_enough_episodes_are_a_group(
    plays: list[Play], enough: int, episodes: int, cancelled: int, failed: int
) -> None:
    ended = gathered(plays, enough)
    assert (len(ended.episodes), ended.cancelled, ended.failed) == (episodes, cancelled, failed)


def test_too_many_failures_are_the_group_s_failure() -> None:
    async def scenario() -> None:
        tasks = [asyncio.ensure_future(play(asyncio.Event())) for play in (fails, waits, fails)]
        with pytest.raises(EpisodeFailed) as failed:
            await first_of(tasks, 2)
        assert failed.value.drop is FAILURE
        tasks[1].cancel()

    asyncio.run(scenario())


def test_a_bug_is_no_failed_episode() -> None:
    async def scenario() -> None:
        tasks = [asyncio.ensure_future(play(asyncio.Event())) for play in (breaks, ends)]
        with pytest.raises(RuntimeError, match="a bug"):
            await first_of(tasks, 1)
        await asyncio.wait(tasks)

    asyncio.run(scenario())


def test_images_that_the_engine_refuses_cost_their_prompt() -> None:
    """With the images goes the prompt with one token for each."""

    class Refusing:
        async def generate(self, tokens: list[int], sampling: Sampling, response: Response) -> None:
            assert response.images is not None
            raise BadRow(f"{tokens} {response.images.prompt_tokens} {response.images.images}.", "another image.")

    prompt = Prompt(PromptRow(0, "d", []), Rendered([1, 7, 7, 2], images=("picture",), short_ids=(1, 7, 2)), "")

    async def scenario() -> None:
        with Slots(1).episode() as slot:
            await single_turn(Refusing(), prompt, Sampling(3), slot)  # type: ignore[arg-type]

    with pytest.raises(EpisodeFailed) as failed:
        asyncio.run(scenario())
    assert failed.value.drop.reason is DropReason.BAD_PROMPT
    assert "[1, 7, 7, 2] (1, 7, 2) ('picture',)" in failed.value.drop.detail


def test_a_prompt_and_its_group_say_what_stands_for_each_image(tmp_path: Path) -> None:
    ids = save_processor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", **ids}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    spec = job_spec(tmp_path, data={"images": {}})
    job = Job(JobId("job-1"), spec, tokenizer, None, pictures=Pictures.of_folder(str(tmp_path)))  # type: ignore[arg-type]
    content = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    texts = {"prompt": json.dumps([{"role": "user", "content": content}])}
    files = [picture(1, 60, 60), picture(2, 200, 120)]
    lease = work_pb2.Lease(prompt_id="0-0", data_source="d", images=files, **texts)
    prompt = asyncio.run(job.prompt(lease))
    assert prompt.text.split(prompt.image_mark) == [
        "user: <|vision_start|>",
        "<|vision_end|>or<|vision_start|>",
        "<|vision_end|>assistant: ",
    ]
    engine = SimpleNamespace(name="vllm")
    answer = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), (), StopReason.LENGTH, "so")
    generator = GroupGenerator(MemberId("rollout-1"), engine, job)  # type: ignore[arg-type]
    group = generator._group(lease, prompt, [Episode.of(answer)], [Scored(1.0)])
    assert group.image_mark == prompt.image_mark and list(group.images) == files
    plain = asyncio.run(job.prompt(work_pb2.Lease(prompt_id="0-1", data_source="d", prompt='"how"')))
    assert plain.text == "how" and not plain.image_mark
