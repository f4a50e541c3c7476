"""The engines of a pool against one plain forward pass for each sequence."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from millrace.errors import InvalidJob
from millrace.spec.pool import Pool, PoolTask
from services.rollout.engine import PoolModel, TokenSequence
from services.rollout.engines import create_scoring
from services.rollout.engines.transformers.scoring import TransformersScoring
from tests.models import save_reward_model
from tests.services.rollout.reference import logits

VLLM = pytest.param("vllm", marks=[pytest.mark.matrix, pytest.mark.e2e, pytest.mark.timeout(600)])
OPTIONS: dict[str, dict[str, Any]] = {"transformers": {"device": "cpu"}, "vllm": {"kv_cache_memory_bytes": 1 << 26}}


def held(
    path: Path,
    task: PoolTask,
    *,
    policy_tokens: int | None = None,
    temperature: float = 1.0,
    engine: str = "transformers",
    **options: Any,
) -> PoolModel:
    given = OPTIONS[engine] | options
    pool = Pool(name="held", path=str(path), dtype="float32", batch_tokens=48, engine_options=given)
    return PoolModel(pool, task, "pools.0", temperature, policy_tokens, longest=60)


def sequence(seed: int, length: int, scored: list[int]) -> TokenSequence:
    tokens_t = np.random.default_rng(seed).integers(0, 259, length).astype(np.int32)
    return TokenSequence(tokens_t, np.asarray(scored))


@pytest.mark.parametrize(
    "name",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.matrix, pytest.mark.e2e, pytest.mark.timeout(400)])],
)
@pytest.mark.parametrize(("policy_tokens", "temperature"), [(None, 1.0), (200, 0.7)])
def test_token_scores_are_those_of_one_pass_over_each_sequence(
    untied_model: Path, policy_tokens: int | None, temperature: float, name: str
) -> None:
    """With gaps between what is scored, several passes, and the policy's smaller vocabulary. A pass of vLLM holds 48
    tokens, so its sequences are computed in parts. Its pieces are tested by test_vllm_scoring.py."""
    sequences = [
        sequence(0, 12, [11]),
        sequence(1, 30, [*range(5, 9), *range(20, 30)]),
        sequence(2, 2, [1]),
        sequence(3, 40, list(range(1, 40))),
    ]
    if policy_tokens is not None:
        sequences = [TokenSequence(one.tokens_t % policy_tokens, one.scored_n) for one in sequences]
    model = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)

    async def scored() -> None:
        engine = create_scoring(name)
        asked: dict[str, Any] = {"policy_tokens": policy_tokens, "temperature": temperature}
        await engine.start(held(untied_model, PoolTask.LOGPROBS, engine=name, **asked))
        try:
            assert engine.vocabulary == 259 and engine.context is not None and engine.context >= 60
            found, without = await engine.score_tokens(sequences, 5), await engine.score_tokens(sequences, 0)
        finally:
            await engine.stop()
        for one, scores, bare in zip(sequences, found, without, strict=True):
            rows = logits(model, one.tokens_t.tolist())[one.scored_n - 1, :policy_tokens]
            expected = (rows / temperature).log_softmax(-1)
            targets = expected[range(len(rows)), one.tokens_t[one.scored_n]]
            np.testing.assert_allclose(scores.logprobs_n, targets.numpy(), atol=1e-4)
            np.testing.assert_allclose(bare.logprobs_n, scores.logprobs_n)
            assert bare.top_tokens_nk.shape == (len(rows), 0)
            top = expected.topk(5, dim=-1)
            np.testing.assert_allclose(scores.top_logprobs_nk, top.values.numpy(), atol=1e-4)
            assert (scores.top_tokens_nk == top.indices.numpy()).mean() > 0.99

    asyncio.run(scored())


def test_rewards_do_not_depend_on_padding_or_on_what_a_sequence_ends_with(tmp_path: Path) -> None:
    """Decoders with a head look for the last token that is no padding: here sequences hold the padding token."""
    folder = save_reward_model(tmp_path)
    sequences = [sequence(seed, length, []).tokens_t for seed, length in enumerate((3, 17, 40, 9))]
    sequences[1][-2:] = 256  # the padding token of tokenizer and model
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        alone = [float(model(torch.from_numpy(one.astype(np.int64))[None]).logits[0, 0]) for one in sequences]

    async def scored() -> list[float]:
        engine = TransformersScoring()
        await engine.start(held(folder, PoolTask.REWARDS))
        rewards = await engine.rewards(sequences)
        await engine.stop()
        return rewards

    assert asyncio.run(scored()) == pytest.approx(alone, abs=1e-4)
    assert len({round(reward, 3) for reward in alone}) == 4


@pytest.mark.parametrize(
    ("labels", "task", "reason"),
    [
        (2, PoolTask.REWARDS, "its head has 2 labels"),
        (1, PoolTask.LOGPROBS, "has no weights for lm_head.weight"),
    ],
)
def test_a_model_that_cannot_do_it_is_refused(tmp_path: Path, labels: int, task: PoolTask, reason: str) -> None:
    folder = save_reward_model(tmp_path, labels=labels)
    with pytest.raises(InvalidJob, match=reason):
        asyncio.run(TransformersScoring().start(held(folder, task)))


def test_a_language_model_is_no_reward_model(untied_model: Path) -> None:
    """Transformers would give it a head of random weights."""
    with pytest.raises(InvalidJob, match=r"pools\.0\.path: .* has no weights for score\.weight"):
        asyncio.run(TransformersScoring().start(held(untied_model, PoolTask.REWARDS)))
