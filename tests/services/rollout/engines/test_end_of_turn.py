"""The tokens that end an answer, read in one place for every engine."""

import json
from pathlib import Path

import pytest

from millrace.errors import InvalidJob
from millrace.spec.pool import Pool, PoolTask
from services.rollout.engine import PoolModel, end_of_turn
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.transformers.replies import TransformersReplies
from tests.models import byte_tokenizer, save_tiny_model
from tests.services.rollout.conftest import Run
from tests.services.rollout.jobs import job_spec

TOKENIZER = 258


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose config names 7, and whose generation_config.json 8 and 9."""
    save_tiny_model(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    return tmp_path


def test_config_generation_config_and_tokenizer_count(folder: Path) -> None:
    assert end_of_turn(str(folder), byte_tokenizer(), trust_remote_code=False) == [7, 8, 9, TOKENIZER]
    (folder / "generation_config.json").unlink()
    assert end_of_turn(str(folder), byte_tokenizer(), trust_remote_code=False) == [7, TOKENIZER]


def test_the_transformers_engine_ends_answers_at_all_of_them(folder: Path, run: Run) -> None:
    engine = TransformersEngine()
    run(engine.start(job_spec(folder)))
    try:
        assert engine._decode_loop._endings.end_of_turn == {7, 8, 9, TOKENIZER}
    finally:
        run(engine.stop())


def test_a_pool_that_replies_does_too(folder: Path) -> None:
    pool = Pool(name="judge", path=str(folder), dtype="float32")
    model = PoolModel(pool, PoolTask.REPLIES, "pools.0", 1.0, 259, longest=60)
    assert TransformersReplies()._build(model)._endings.end_of_turn == {7, 8, 9, TOKENIZER}


@pytest.mark.parametrize("named", ["258", [True], -1, [[1]]])
def test_other_things_than_tokens_are_refused(named: object, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(InvalidJob, match=r"eos_token_id of generation_config\.json is .*Fix: give the id of a token"):
        end_of_turn(str(folder), byte_tokenizer(), trust_remote_code=False)
