"""Models with experts, and with a router's bias that stays float32, in the `transformers` engine. vLLM is compared with
Hugging Face for every architecture beside Megatron."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from millrace.errors import InvalidJob
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import Completion, Engine, Response, Sampling
from services.rollout.engines import create
from services.rollout.engines.transformers.decode_batch import Routing
from tests.models import byte_tokenizer
from tests.sender import Sender
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.test_engines import Case
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.trainer.backends.megatron import tiny
from tests.shard_sender import Shards, ShardSender

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "moonlight")
PROMPT = [257, *b"a question", 258]


async def receive(engine: Engine, sender: Sender | ShardSender) -> None:
    await Case(engine, tied=False, dtype=torch.float32).receive(sender)
    await engine.commit(sender.request.version, "recompute")


async def publish_shards(engine: Engine, tensors: dict[str, torch.Tensor], version: int) -> None:
    shards = Shards(tensors)
    await receive(engine, ShardSender(shards, await engine.describe(shards.manifest), version=version))


def held(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}


def experts_of(model: Any, prompts: Sequence[list[int]], samples: Sequence[Completion]) -> Iterator[tuple[Any, Any]]:
    """For each sample the experts that the engine reported, and those that the model chooses for the whole sequence at
    once: of every token but the last. Both are sorted, because the order of two chosen experts depends on rounding."""
    routing = Routing(model)
    for prompt, sample in zip(prompts, samples, strict=True):
        sequence = torch.tensor([[*prompt, *sample.tokens[:-1].tolist()]])
        with torch.no_grad():
            model(sequence)
        (expected,) = routing.taken(torch.ones_like(sequence))
        assert sample.experts is not None and sample.experts.shape == expected.shape
        yield np.sort(sample.experts, axis=-1), np.sort(expected, axis=-1)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in KINDS),
        # deepseek_v3 has a router's bias beside experts, and moonlight the same bias
        *(pytest.param(kind, "bfloat16", marks=[pytest.mark.matrix] * (kind != "deepseek_v3")) for kind in KINDS),
    ],
)
def test_versions_arrive_and_are_what_is_sampled_from(kind: str, dtype: str, run: Run, tmp_path: Path) -> None:
    model = tiny.save(kind, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name: t if "e_score" in name else t.to(getattr(torch, dtype)) for name, t in stored.items()}
    nothing = {name: (1.5 * t + 0.1).to(t.dtype) for name, t in tensors.items()}

    async def scenario() -> None:
        engine = create("transformers")
        await engine.start(job_spec(tmp_path, rollout={"dtype": dtype}))
        try:
            await publish_shards(engine, nothing, 1)
            await receive(engine, Sender(tensors, version=2))
            oracle = held(engine)
            await publish_shards(engine, nothing, 3)
            await publish_shards(engine, tensors, 4)
            assert all(torch.equal(tensor, oracle[name]) for name, tensor in held(engine).items())
            assert {name: t.dtype for name, t in held(engine).items() if "e_score" in name} == {
                name: torch.float32 for name in oracle if "e_score" in name
            }
            samples = await asyncio.gather(*(engine.generate(PROMPT, Sampling(24)) for _ in range(4)))
            for sample in samples if dtype == "float32" else ():
                expected = logprobs(model, PROMPT, sample.tokens)
                assert np.abs(sample.logprobs - expected).max() < 1e-3
        finally:
            await engine.stop()

    run(scenario())


def test_what_the_trainer_publishes_is_what_the_engine_wants(run: Run, tmp_path: Path) -> None:
    """Under the same names and in the same dtypes."""
    from services.trainer.backends.fsdp2.published import manifest

    model = tiny.save("deepseek_v3", tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    async def scenario() -> None:
        engine = create("transformers")
        await engine.start(job_spec(tmp_path, rollout={"dtype": "bfloat16"}))
        try:
            published: Manifest = manifest(model, "bfloat16")
            assert {t.dtype for t in published.tensors if t.name.endswith("e_score_correction_bias")} == {"float32"}
            assert len(await engine.describe(published)) == 1
        finally:
            await engine.stop()

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_told_where_the_trainer_is_to_replay_them(kind: str, run: Run, tmp_path: Path) -> None:
    """They are those that the model chooses for the whole sequence at once, of every token but the last."""
    model = tiny.save(kind, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    spec = job_spec(tmp_path, trainer={"backend": "megatron"}, algorithm={"router_replay": True})

    async def scenario() -> None:
        engine = create("transformers")
        await engine.start(spec)
        try:
            await receive(engine, Sender(load_file(tmp_path / "model.safetensors"), version=1))
            prompts = [PROMPT, [*PROMPT, *PROMPT], PROMPT[:4]]
            samples = await asyncio.gather(*(engine.generate(p, Sampling(12 + 5 * i)) for i, p in enumerate(prompts)))
            prompts *= 2
            for prompt, sample in zip(prompts, list(samples), strict=False):
                # Without experts, as they were reported with neither of the parts.
                rest = Response(sample.partial.first(max(1, len(sample.tokens) // 2)))
                samples.append(await engine.generate(prompt, Sampling(24), rest))
        finally:
            await engine.stop()
        for told, expected in experts_of(model, prompts, samples):
            assert np.array_equal(told, expected)

    run(scenario())


def test_a_model_without_experts_has_none_to_replay(run: Run, tied_model: Path) -> None:
    spec = job_spec(tied_model, trainer={"backend": "megatron"}, algorithm={"router_replay": True})
    with pytest.raises(InvalidJob, match=r"algorithm\.router_replay: true: the model has no experts"):
        run(create("transformers").start(spec))
