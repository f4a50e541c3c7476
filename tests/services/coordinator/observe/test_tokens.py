"""The tokens of groups: what is kept of them, and how they are told."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from millrace.contracts.v1 import common_pb2, trainer_pb2
from millrace.ids import PromptId, Purpose
from millrace.wire.arrays import pack_floats, pack_logprobs, pack_tokens
from services.coordinator.observe import tokens
from services.coordinator.observe.groups import samples_in, samples_of
from services.coordinator.store import Store, records
from services.coordinator.store.prompts import Prompts
from services.coordinator.store.records import TokenRecord
from tests.services.coordinator.redis import a_job

WORDS = ["a", "b", "Ã", "©", "c"]
"""The third and the fourth are the two bytes of é."""


def group() -> common_pb2.Group:
    """A plain answer, and one of two turns with a token given between them."""
    made = common_pb2.Group(prompt_id="0-1", prompt_tokens=pack_tokens([0, 1]))
    made.trajectories.add(
        tokens=pack_tokens([2, 3]),
        logprobs=pack_logprobs([-0.5, -0.25]),
        versions=[common_pb2.VersionSpan(version=4, start=0, end=2)],
    )
    spans = [common_pb2.VersionSpan(version=4, start=0, end=1), common_pb2.VersionSpan(version=5, start=2, end=3)]
    turns = [common_pb2.Turn(start=0, end=1), common_pb2.Turn(start=2, end=3)]
    made.trajectories.add(
        tokens=pack_tokens([4, 1, 0]), logprobs=pack_logprobs([-1.0, -2.0]), versions=spans, turns=turns
    )
    return made


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_each_token_has_its_text_version_and_log_probability(model: str) -> None:
    plain, turns = tokens.views(tokens.record(group()), model)
    assert plain.prompt_tokens == 2 and plain.ids == [0, 1, 2, 3]
    assert plain.texts == ["a", "b", "", "é"]
    assert plain.logprobs == [None, None, -0.5, -0.25] and plain.versions == [None, None, 4, 4]
    assert turns.logprobs == [None, None, -1.0, None, -2.0] and turns.versions == [None, None, 4, None, 5]
    assert plain.trainer_logprobs == plain.advantages == []


def trained(*trajectories: tuple[list[float], list[float]]) -> trainer_pb2.TrainedGroup:
    """Log-probabilities and advantages of each trajectory."""
    told = [
        trainer_pb2.TrainedTrajectory(logprobs=pack_logprobs(logprobs), advantages=pack_floats(advantages))
        for logprobs, advantages in trajectories
    ]
    return trainer_pb2.TrainedGroup(prompt_id="0-1", trajectories=told)


FITTING = ([-0.75, -0.5], [1.0, -1.0])


def test_each_sampled_token_has_what_the_trainer_told(model: str) -> None:
    told = trained(FITTING, ([], [0.5, 0.25]))
    assert tokens.fits(told, group())
    plain, turns = tokens.views(tokens.record(group(), told), model)
    assert plain.trainer_logprobs == [None, None, -0.75, -0.5] and plain.advantages == [None, None, 1.0, -1.0]
    assert turns.trainer_logprobs == [] and turns.advantages == [None, None, 0.5, None, 0.25]
    assert [one.advantage for one in samples_of(group(), 1, trained=told)] == [0.0, 0.375]
    assert [one.advantage for one in samples_of(group(), 1)] == [None, None]


@pytest.mark.parametrize(
    "told",
    [
        trained(FITTING),
        trained(FITTING, ([-0.5], [0.5, 0.25])),
        trained(FITTING, ([-0.5, -0.5], [])),
        trained(FITTING, ([-0.5, -0.5], [0.5, float("nan")])),
        trained(FITTING, ([-0.5, -float("inf")], [0.5, 0.5])),
    ],
)
def test_what_does_not_fit_its_group_is_left_out(told: trainer_pb2.TrainedGroup, redis_url: str) -> None:
    class Held(Prompts):
        async def group(self, prompt: PromptId) -> bytes:
            return group().SerializeToString()

    async def play() -> None:
        store, job = Store(redis_url), a_job()
        try:
            held, prompt = Held(store.connection, job.id, Purpose.TRAIN), PromptId("0-1")
            shown = await samples_in(held, store.records(job.id), [prompt], 1, {prompt: told})
            assert [one.advantage for one in shown] == [None, None]
            kept = await store.records(job.id).tokens(shown[0].record)
            assert kept is not None and not kept.trained
        finally:
            await store.close()

    assert not tokens.fits(told, group())
    asyncio.run(play())


@pytest.mark.parametrize("content", [None, "{}"])
def test_without_a_tokenizer_there_are_ids(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    plain, _ = tokens.views(tokens.record(group()), str(tmp_path))
    assert plain.texts is None and plain.ids == [0, 1, 2, 3]


def test_old_records_make_room_for_new_ones(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "TOKEN_RECORDS", 3)

    async def play() -> None:
        store, job = Store(redis_url), a_job()
        try:
            await store.connection.do("FLUSHALL")
            await store.jobs.create(job)
            own = store.records(job.id)
            made = [TokenRecord(bytes([number]), bytes([number] * (number % 2))) for number in range(5)]
            names = [await own.add_tokens(record) for record in made]
            found = [await own.tokens(name) for name in names]
            assert found == [None, None, *made[2:]]
            monkeypatch.setattr(records, "TOKEN_BYTES_KEPT", 200)
            large = TokenRecord(bytes(75), bytes(75))
            newest = await own.add_tokens(large)
            assert [await own.tokens(name) for name in (names[-1], newest)] == [None, large]
        finally:
            await store.close()

    asyncio.run(play())
