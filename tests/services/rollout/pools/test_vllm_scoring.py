"""vLLM as the engine of a pool, without its processes: arguments, logits and answers.
`test_scoring_engine.py` compares a real one with plain passes in `make test-all`."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.errors import InvalidJob
from millrace.spec.pool import PoolTask
from services.rollout.engines.vllm.pools import replies
from services.rollout.engines.vllm.pools.scoring import VllmScoring, engine_arguments, token_scores
from services.rollout.engines.vllm.worker import ScoringExtension
from tests.services.rollout.pools.test_scoring_engine import held


def test_a_pool_becomes_arguments_of_vllm(untied_model: Path) -> None:
    """The sequence has one place more than is scored: vLLM samples a token after it."""
    arguments = engine_arguments(held(untied_model, PoolTask.LOGPROBS, engine="vllm", max_num_seqs=4))
    assert (arguments.model, arguments.dtype, arguments.load_format) == (str(untied_model), "float32", "auto")
    assert (arguments.max_model_len, arguments.max_num_batched_tokens, arguments.max_num_seqs) == (61, 48, 4)
    assert arguments.max_logprobs == -1 and not arguments.enable_prefix_caching


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, r"pools\.0\.engine_options\.dtype: .* set pools\.0\.dtype instead"),
        ({"nnodes": 2}, r"pools\.0\.engine_options\.nnodes: .* remove it"),
        ({"max_num_seq": 2}, r"pools\.0\.engine_options\.max_num_seq: .* did you mean `max_num_seqs`"),
    ],
)
def test_options_that_a_pool_cannot_have_are_refused(untied_model: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        engine_arguments(held(untied_model, PoolTask.LOGPROBS, engine="vllm", **options))


def test_a_judge_becomes_arguments_of_vllm(untied_model: Path) -> None:
    """It takes as much as its model, and keeps the beginnings of prompts, which a judge's template repeats."""
    arguments = replies.engine_arguments(held(untied_model, PoolTask.REPLIES, engine="vllm", max_num_seqs=4))
    assert (arguments.model, arguments.dtype, arguments.load_format) == (str(untied_model), "float32", "auto")
    assert (arguments.max_model_len, arguments.max_num_seqs, arguments.enable_prefix_caching) == (None, 4, True)
    assert not arguments.worker_extension_cls and arguments.logprobs_mode == "processed_logprobs"
    with pytest.raises(InvalidJob, match=r"pools\.0\.engine_options\.dtype: .* set pools\.0\.dtype instead"):
        replies.engine_arguments(held(untied_model, PoolTask.REPLIES, engine="vllm", dtype="float16"))


def test_a_reward_model_is_refused(untied_model: Path) -> None:
    with pytest.raises(InvalidJob, match=r'pools\.0\.name: "held": replicas with the engine vllm .* transformers'):
        asyncio.run(VllmScoring().start(held(untied_model, PoolTask.REWARDS, engine="vllm")))


def test_logits_have_the_temperature_and_the_vocabulary_of_the_policy() -> None:
    logits_nv = torch.randn(3, 7, dtype=torch.bfloat16)
    model = SimpleNamespace(compute_logits=lambda hidden: logits_nv if hidden else None)
    worker = ScoringExtension()
    worker.get_model = lambda: model
    worker.millrace_score(0.5, 5)
    found, expected = model.compute_logits(True).log_softmax(-1), (logits_nv.float()[:, :5] / 0.5).log_softmax(-1)
    torch.testing.assert_close(found[:, :5], expected)
    assert (found[:, 5:] == -float("inf")).all() and model.compute_logits(False) is None


def test_places_with_gaps_are_taken_out_of_the_answer() -> None:
    """Four tokens: the first has no score, each further one comes before the two most likely ones."""
    answer = SimpleNamespace(token_ids=[7, 1, 2, 8, 3, 4, 9, 5, 6], logprobs=[-7, -1, -2, -8, -3, -4, -9, -5, -6])
    scores = token_scores(answer, np.array([1, 3]), 2)
    assert scores.logprobs_n.tolist() == [-7, -9]
    assert scores.top_tokens_nk.tolist() == [[1, 2], [5, 6]] and scores.top_logprobs_nk.tolist() == [[-1, -2], [-5, -6]]
