"""Data-parallel attention with the experts over two GPUs: tokens of both ranks have the version that sampled them,
before and after a publication in the middle of answers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine import Completion, Sampling
from services.rollout.engines import create
from tests.gpu.test_experts import GROUPED_SIZES, LATENT_SIZES, OPTIONS, needs
from tests.models import byte_tokenizer
from tests.services.rollout.engines.test_vllm_ranks import PROMPTS, RANKS, Served
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.trainer.backends.megatron import tiny

pytestmark = [pytest.mark.gpu(RANKS), pytest.mark.timeout(500)]
ANSWER = Sampling(max_response_tokens=150)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3_moe", GROUPED_SIZES), ("deepseek_v3", LATENT_SIZES)])
def test_tokens_of_both_ranks_have_the_version_that_sampled_them(
    kind: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    needs("vllm")
    model = tiny.save(kind, tmp_path, served=True, **sizes)
    byte_tokenizer().save_pretrained(tmp_path)
    options = {**OPTIONS["vllm"], "data_parallel_size": RANKS}
    spec = job_spec(tmp_path, rollout={"dtype": "bfloat16", "engine_options": options})

    async def scenario() -> tuple[Served, list[Completion], list[int]]:
        engine = create("vllm")
        await engine.start(spec)
        try:
            served = Served(engine, tmp_path, model, torch.bfloat16)
            assert engine.world_size == RANKS
            await served.publish(False, None)
            served.ranks = []
            flying = [asyncio.create_task(engine.generate(prompt, ANSWER)) for prompt in PROMPTS * 4]
            await served.publish(True, None)
            answers = await asyncio.gather(*flying)
            answers += await asyncio.gather(*(engine.generate(prompt, ANSWER) for prompt in PROMPTS * 4))
            return served, answers, served.ranks
        finally:
            await engine.stop()

    served, answers, ranks = asyncio.run(scenario())
    crossing = {rank for rank, answer in zip(ranks, answers, strict=True) if len(answer.versions) == 2}
    assert crossing == set(range(RANKS))
    plain = {version: served.models[version == 2].bfloat16() for version in (1, 2)}
    apart: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for prompt, answer in zip(PROMPTS * 8, answers, strict=True):
        under = {version: logprobs(plain[version], prompt, answer.tokens) for version in plain}
        for span in answer.versions:
            for version in plain:
                part = (under[version] - answer.logprobs)[span.start : span.end]
                apart[version == span.version].append(part)
    right, wrong = (np.concatenate(apart[same]) for same in (True, False))
    assert np.mean(np.expm1(right) - right) < 0.01 and np.mean(np.expm1(wrong) - wrong) > 0.1
