"""Models with GatedDeltaNet layers: each token has the log-probability that transformers computes under the version
that made it, also where a version arrives in the middle of answers and where prompts come again."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.weights.loader.stored import pieces, stored_tensors
from services.rollout.engine import Sampling
from services.rollout.engines import create
from tests.hybrid_models import save_hybrid_model
from tests.models import byte_tokenizer
from tests.sender import Sender
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.test_experts import publish_shards, receive
from tests.services.rollout.jobs import ENGINE_OPTIONS, job_spec
from tests.services.rollout.reference import logprobs

pytestmark = pytest.mark.slow
LENGTHS = (1, 5, 63, 64, 65, 130)
CLOSE = 1e-3


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 240, length).tolist() for length in LENGTHS]


def test_no_state_is_of_another_version(run: Run, tmp_path: Path) -> None:
    check("vllm", "qwen3_next", run, tmp_path)


@pytest.mark.matrix  # test_no_state_is_of_another_version has the cache on
def test_nor_without_a_prefix_cache(run: Run, tmp_path: Path) -> None:
    check("vllm", "qwen3_next", run, tmp_path, enable_prefix_caching=False)


def check(name: str, kind: str, run: Run, folder: Path, **options: Any) -> None:
    models = [loaded(save_hybrid_model(folder / str(seed), kind, seed)) for seed in range(3)]
    path = folder / "0"
    byte_tokenizer().save_pretrained(path)
    spec = job_spec(path, name, rollout={"engine_options": {**ENGINE_OPTIONS[name], **options}})

    async def scenario() -> None:
        engine = create(name)
        await engine.start(spec)
        try:
            await publish_shards(engine, stored(models[0]), 1)
            await compare(engine, models)
            asked = [asyncio.create_task(engine.generate(prompt, Sampling(60))) for prompt in prompts()]
            await asyncio.sleep(0.5)
            await receive(engine, Sender(stored(models[1]), version=2))
            await check_answers([await each for each in asked], models)
            await compare(engine, models)
            await publish_shards(engine, stored(models[2]), 3)
            await compare(engine, models)
        finally:
            await engine.stop()

    run(scenario())


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def stored(model: Any) -> dict[str, torch.Tensor]:
    """What the trainer publishes: it builds the model from its config, and not from its folder."""
    built: Any = type(model)(model.config)
    built.load_state_dict(model.state_dict())
    whole = stored_tensors(built)
    return {piece: each.detach().contiguous() for name, t in whole for piece, each in pieces(built, name, t).items()}


async def compare(engine: Any, models: list[Any]) -> None:
    """Twice: the second time prompts may be cached."""
    for _ in range(2):
        await check_answers(
            await asyncio.gather(*(engine.generate(prompt, Sampling(20)) for prompt in prompts())), models
        )


async def check_answers(answers: list[Any], models: list[Any]) -> None:
    for prompt, answer in zip(prompts(), answers, strict=True):
        expected = np.stack([logprobs(model, prompt, answer.tokens) for model in models])
        versions = np.concatenate([np.full(span.end - span.start, int(span.version)) for span in answer.versions])
        of_own = expected[versions - 1, np.arange(len(versions))]
        assert np.abs(answer.logprobs - of_own).max() < CLOSE, (len(prompt), versions.tolist())
