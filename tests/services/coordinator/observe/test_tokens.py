"""The tokens of groups: what is kept of them, and how they are told."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from millrace.wire.arrays import pack_logprobs, pack_tokens
from millrace.wire.v1 import common_pb2
from services.coordinator.observe import tokens
from services.coordinator.store import Store, records
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
            names = [await own.add_tokens(bytes([number])) for number in range(5)]
            found = [await own.tokens(name) for name in names]
            assert found == [None, None, b"\x02", b"\x03", b"\x04"]
            monkeypatch.setattr(records, "TOKEN_BYTES_KEPT", 200)
            newest = await own.add_tokens(bytes(150))
            assert [await own.tokens(name) for name in (names[-1], newest)] == [None, bytes(150)]
        finally:
            await store.close()

    asyncio.run(play())
