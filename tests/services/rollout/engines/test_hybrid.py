"""Models with GatedDeltaNet layers: each token has the log-probability that transformers computes under the version
that made it, also where a version arrives in the middle of answers and where prompts come again; and every way of
publishing puts the same bytes in place."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidJob
from millrace.weights.loader.stored import pieces, stored_tensors
from millrace.weights.plans.manifest import Content
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.delta.exchange import Snapshot
from services.rollout.engine import Completion, Sampling
from services.rollout.engines import create
from services.rollout.engines.adapter import adapter_shape
from tests.adapters import published, with_adapter
from tests.hybrid_models import KINDS, save_hybrid_model
from tests.layouts import packed_by
from tests.models import byte_tokenizer
from tests.sender import Sender
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.test_engines import Case, WholeReceiver
from tests.services.rollout.jobs import ENGINE_OPTIONS, adapter_job, job_spec
from tests.services.rollout.reference import logits, logprobs
from tests.shard_sender import Shards, ShardSender

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM on GPUs is refused for these models"),
]
LENGTHS = (1, 5, 63, 64, 65, 130)
CLOSE = 1e-3
TIE = 2e-5
SHADOW, INPLACE = weights_pb2.COMMIT_MODE_SHADOW, weights_pb2.COMMIT_MODE_INPLACE
COVERING = "qwen3_5_moe"
"""Has experts, the flat projections of Qwen3.5, and a tower that the engine leaves out. The others are in the matrix,
Qwen3-Next with its interleaved projections among them."""


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 240, length).tolist() for length in LENGTHS]


def test_no_state_is_of_another_version(run: Run, tmp_path: Path) -> None:
    check(COVERING, run, tmp_path)


@pytest.mark.matrix  # test_no_state_is_of_another_version covers one kind
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != COVERING])
def test_nor_in_other_kinds(kind: str, run: Run, tmp_path: Path) -> None:
    check(kind, run, tmp_path)


@pytest.mark.matrix  # test_no_state_is_of_another_version has the cache on, and one worker
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 48, "max_num_seqs": 4},  # a prompt takes several passes, each shorter than a block
    ],
    ids=["no-prefix-cache", "two-workers", "short-passes"],
)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_nor_with_other_options(kind: str, options: dict[str, Any], run: Run, tmp_path: Path) -> None:
    check(kind, run, tmp_path, **options)


def check(kind: str, run: Run, folder: Path, **options: Any) -> None:
    path, models = made(folder, kind)

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, stored(models[0]), 1)
        await compare(engine, models)
        answers = await across(engine, stored(models[1]), 2, "recompute")
        check_answers(answers, models)
        assert any(len(answer.versions) == 2 for answer in answers), "no answer was in flight across the publication"
        await compare(engine, models)
        await publish_shards(engine, stored(models[2]), 3)
        await compare(engine, models)

    started(run, job_spec(path, "vllm", rollout={"engine_options": {**ENGINE_OPTIONS["vllm"], **options}}), scenario)


@pytest.mark.matrix  # test_no_state_is_of_another_version has the policy `recompute`
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_kept_states_end_with_the_answers_in_flight(kind: str, run: Run, tmp_path: Path) -> None:
    path, models = made(tmp_path, kind)

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, stored(models[0]), 1)
        crossing = [a for a in await across(engine, stored(models[1]), 2, "keep") if len(a.versions) == 2]
        assert crossing
        apart = []
        for prompt, answer in zip(prompts(), crossing, strict=False):
            at = answer.versions[0].end
            assert np.abs(answer.logprobs - logprobs(models[0], prompt, answer.tokens))[:at].max() < CLOSE
            apart.append(np.abs(answer.logprobs - logprobs(models[1], prompt, answer.tokens))[at:])
        assert np.concatenate(apart).max() > 0.1, "the states were computed again"
        await compare(engine, models)

    started(run, job_spec(path, "vllm"), scenario)


@pytest.mark.matrix  # tests of publication with other models; the layouts of these are in test_no_state_is_…
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_every_way_of_publishing_puts_the_same_bytes_in_place(
    kind: str, workers: int, run: Run, tmp_path: Path
) -> None:
    path, models = made(tmp_path, kind)
    first, second = (stored(model) for model in models[:2])
    changed = {name: torch.where(torch.rand(t.shape) < 0.02, t * 1.5, t) for name, t in second.items()}

    async def scenario(engine: Any) -> None:
        await receive(engine, Sender(changed, version=1, receivers=workers))
        oracle = await engine.checksums()
        for version, mode in ((2, SHADOW), (4, INPLACE)):
            await publish_shards(engine, first, version)
            assert await engine.checksums() != oracle
            await publish_shards(engine, changed, version + 1, mode=mode)
            assert await engine.checksums() == oracle
        snapshots, sizes = await snapshots_of(engine, second), []
        base = ""
        for version, tensors in ((6, second), (7, changed)):
            sent = await publish_shards(engine, tensors, version, snapshots=snapshots, base=base)
            base = sent.request.key
            sizes.append(sent.sent_bytes)
        assert sizes[1] < 0.2 * sizes[0] and await engine.checksums() == oracle
        if workers == 1:
            await check_copy(engine, changed, 7)

    options = {**ENGINE_OPTIONS["vllm"], "tensor_parallel_size": workers}
    started(run, job_spec(path, "vllm", rollout={"engine_options": options}), scenario)


@pytest.mark.matrix  # test_no_state_is_of_another_version has float32
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_decay_rates_of_bfloat16_are_the_trainers(kind: str, run: Run, tmp_path: Path) -> None:
    """The engine keeps A_log in float32. The trainer computes with it as rounded to the dtype of its passes, and that
    is what it publishes."""
    path, (model, *_) = made(tmp_path, kind)
    rounded = {name: tensor.bfloat16() for name, tensor in stored(model).items()}

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, rounded, 1)
        (held,) = await engine.checksums()
        rates = {name: tensor.float() for name, tensor in rounded.items() if name.endswith("A_log")}
        assert rates and {name: held[name] for name in rates} == {n: checksum(rate) for n, rate in rates.items()}
        model.to(torch.bfloat16)
        answers = await asyncio.gather(*(engine.generate(prompt, Sampling(60)) for prompt in prompts()))
        apart = [
            logprobs(model, prompt, answer.tokens).astype(np.float64) - answer.logprobs
            for prompt, answer in zip(prompts(), answers, strict=True)
        ]
        difference = np.concatenate(apart)
        assert (np.exp(difference) - 1 - difference).mean() < 0.01
        await check_copy(engine, rounded, 1)

    started(run, job_spec(path, "vllm", rollout={"dtype": "bfloat16"}), scenario)


@pytest.mark.matrix  # test_vllm_adapters.py has adapters of other models
def test_adapters_of_attention_and_mlp(run: Run, tmp_path: Path) -> None:
    path, (base, *_) = made(tmp_path, "qwen3_5")
    spec = adapter_job(path, "vllm")
    shape = adapter_shape(spec)
    assert shape is not None and not any("linear_attn" in layer.name for layer in shape.layers)
    names = [layer.name for layer in shape.layers]
    adapted = [with_adapter(base, seed=seed, rank=8, alpha=16.0, targets=names) for seed in range(2)]

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, stored(base), 1, content=Content.BASE)
        await publish_shards(engine, published(adapted[0]), 2, content=Content.ADAPTER)
        models = [base, *adapted]
        await compare(engine, models)
        answers = await across(engine, published(adapted[1]), 3, "recompute", Content.ADAPTER)
        check_answers(answers, models)
        await compare(engine, models)

    started(run, spec, scenario)


def test_adapters_inside_the_recurrence_are_refused_by_name(tmp_path: Path) -> None:
    path = save_hybrid_model(tmp_path, "qwen3_5")
    with pytest.raises(InvalidJob, match=r"in_proj_qkv.*GatedDeltaNet"):
        adapter_shape(adapter_job(path, "vllm", targets=["q_proj", "in_proj_qkv"]))


def made(folder: Path, kind: str) -> tuple[Path, list[Any]]:
    """A model folder with a tokenizer, and three models of its config: versions 1 to 3."""
    models = [loaded(save_hybrid_model(folder / str(seed), kind, seed)) for seed in range(3)]
    byte_tokenizer().save_pretrained(folder / "0")
    return folder / "0", models


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def started(run: Run, spec: Any, scenario: Any) -> None:
    async def whole() -> None:
        engine = create("vllm")
        await engine.start(spec)
        try:
            await scenario(engine)
        finally:
            await engine.stop()

    run(whole())


def stored(model: Any) -> dict[str, torch.Tensor]:
    """What the trainer publishes: it builds the model from its config, and not from its folder."""
    built: Any = type(model)(model.config)
    built.load_state_dict(model.state_dict())
    whole = stored_tensors(built)
    return {piece: each.detach().contiguous() for name, t in whole for piece, each in pieces(built, name, t).items()}


async def receive(engine: Any, sender: Sender | ShardSender, cache_policy: str = "recompute") -> None:
    await Case(engine, tied=False, dtype=torch.float32).receive(sender)
    version = None if sender.request.manifest.content is Content.BASE else sender.request.version
    await engine.commit(version, cache_policy)


async def publish_shards(
    engine: Any, tensors: Mapping[str, torch.Tensor], version: int, *, content: Content = Content.MODEL, **options: Any
) -> ShardSender:
    shards = Shards(tensors, content=content)
    sender = ShardSender(shards, await engine.describe(shards.manifest), version=version, **options)
    await receive(engine, sender)
    return sender


async def across(
    engine: Any, tensors: Mapping[str, torch.Tensor], version: int, policy: str, content: Content = Content.MODEL
) -> list[Completion]:
    """Answers during which `tensors` were published as `version`."""
    asked = [asyncio.create_task(engine.generate(prompt, Sampling(100))) for prompt in prompts()]
    async with asyncio.timeout(120):
        while engine.load().running < min(len(asked), engine.capacity):  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
    await receive(engine, Sender(tensors, version=version, content=content, receivers=engine.world_size), policy)
    return [await each for each in asked]


async def snapshots_of(engine: Any, tensors: Mapping[str, torch.Tensor]) -> list[Snapshot]:
    shards = Shards(tensors)
    plan = ShardSender(shards, await engine.describe(shards.manifest), version=0).plan
    sizes = [{content: int(plan.sizes[content]) for content in packed_by(plan, rank).tolist()} for rank in range(2)]
    return [Snapshot(plan.hash, each, torch.device("cpu")) for each in sizes]


async def check_copy(engine: Any, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """A sibling that joins gets every tensor of `version` as it was published."""
    manifest = Shards(tensors).manifest
    sibling = WholeReceiver(manifest, await engine.describe(manifest))
    await engine.prepare_send(sibling.request, f"job-test/{version}/1/0")
    sending = asyncio.create_task(engine.send(sibling.request))
    await asyncio.to_thread(sibling.receive)
    await sending
    await engine.end_send()
    for name, tensor in tensors.items():
        assert torch.equal(sibling.tensors[name], tensor), name


def before_a_tie(model: Any, prompt: list[int], answer: Sequence[int]) -> int:
    """Number of the answer's tokens before the first one of which a router chooses between experts that are nearly
    equal: rounding decides there, by 0.2 nats (seen with logits that were 2e-6 apart)."""
    found: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda *call: found.append(call[2][0])) for router in routers]
    logits(model, [*prompt, *answer])
    for hook in hooks:
        hook.remove()
    close = torch.zeros(len(answer), dtype=torch.bool)
    for scores in found:
        ordered = scores.sort(-1, descending=True).values[len(prompt) - 1 : -1]
        chosen = model.config.num_experts_per_tok
        close |= ordered[:, chosen - 1] - ordered[:, chosen] < TIE
    return int(close.int().argmax()) if close.any() else len(answer)


async def compare(engine: Any, models: list[Any]) -> None:
    """Twice: the second time prompts may be cached."""
    for _ in range(2):
        check_answers(await asyncio.gather(*(engine.generate(prompt, Sampling(20)) for prompt in prompts())), models)


def check_answers(answers: list[Completion], models: list[Any]) -> None:
    for prompt, answer in zip(prompts(), answers, strict=True):
        expected = np.stack([logprobs(model, prompt, answer.tokens) for model in models])
        versions = np.concatenate([np.full(span.end - span.start, int(span.version)) for span in answer.versions])
        of_own = expected[versions - 1, np.arange(len(versions))]
        sure = min(before_a_tie(model, prompt, answer.tokens) for model in models)
        apart = np.abs(answer.logprobs - of_own)[:sure]
        assert apart.max(initial=0.0) < CLOSE, (len(prompt), int(apart.argmax()), answer.versions)
