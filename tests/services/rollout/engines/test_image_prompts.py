"""vLLM with prompts that have images: each token has the log-probability that transformers computes under the version
that made it, before, during and after publications of the language model, or of the whole model with its tower."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.data.pictures import Pictures
from millrace.errors import BadRow, InvalidJob
from millrace.weights.loader.stored import pieces, stored_tensors
from millrace.weights.plans.manifest import Content
from services.rollout.engine import Completion, Response, Sampling, ShownImages
from services.rollout.engines.options import check_images
from services.rollout.engines.vllm import options as vllm_options
from tests.adapters import published, with_adapter
from tests.image_models import (
    END,
    KINDS,
    PAD,
    START,
    language_layers,
    opened_model,
    picture,
    save_image_model,
    scores_alone,
    trained_part,
    whole_of,
)
from tests.sender import Sender
from tests.services.rollout.conftest import Run
from tests.services.rollout.engines.test_hybrid import publish_shards, receive, started
from tests.services.rollout.jobs import adapter_job, job_spec

pytestmark = pytest.mark.slow
IMAGE = [START, PAD, END]
CLOSE = 1e-3
PROMPTS: tuple[tuple[list[int], tuple[tuple[int, int], ...]], ...] = (
    ([*IMAGE, 5, 6, 7], ((90, 130),)),  # first
    ([1, 2, 3, *IMAGE], ((170, 60),)),  # last
    ([9, 8, 7, 6], ()),  # none
    ([4, *IMAGE, *IMAGE, 11, *IMAGE], ((60, 60), (200, 120), (60, 60))),  # adjacent, one of them twice
    ([*IMAGE, 5, 6, 7], ((90, 131),)),  # the same tokens as the first, another picture
)
"""Tokens with one for each image; width and height of each image."""


class Asked:
    """The prompts of the test."""

    def __init__(self, folder: Path) -> None:
        self.pictures = Pictures.of_folder(str(folder))
        self.files = [tuple(picture(w * h, w, h) for w, h in sizes) for _, sizes in PROMPTS]
        self.images = [self.pictures.opened(files) for files in self.files]
        pairs = zip(PROMPTS, self.images, strict=True)
        self.prompts = [self.pictures.expanded(short, images) for (short, _), images in pairs]

    async def answers(self, engine: Any, tokens: int) -> list[Completion]:
        return list(await asyncio.gather(*(self.answer(engine, row, tokens) for row in range(len(PROMPTS)))))

    async def answer(self, engine: Any, row: int, tokens: int) -> Completion:
        shown = ShownImages(self.images[row], PROMPTS[row][0]) if self.images[row] else None
        completion: Completion = await engine.generate(
            self.prompts[row], Sampling(tokens), Response(images=shown) if shown else None
        )
        return completion

    async def continued(self, engine: Any) -> list[Completion]:
        """Answers that another replica began, also one in which the policy sampled the token that stands for images."""
        begun = await self.answers(engine, 12)
        prefixes = [answer.partial.first(5) for answer in begun]
        prefixes[3].tokens[2:3] = PAD
        whole = []
        for row, prefix in enumerate(prefixes):
            shown = ShownImages(self.images[row], PROMPTS[row][0]) if self.images[row] else None
            whole.append(await engine.generate(self.prompts[row], Sampling(12), Response(prefix, shown)))
        assert sum(len(answer.tokens) > 5 and answer.carried == 5 for answer in whole) > 2
        return whole


def language_model(model: Any, *, with_tower: bool = False) -> dict[str, torch.Tensor]:
    """What the trainer publishes: tensors of the tower only if it trains the tower."""
    part = trained_part(model)
    whole = [(name, tensor) for name, tensor in stored_tensors(part) if ".visual." not in name]
    if with_tower:
        whole += [(f"model.visual.{name}", tensor) for name, tensor in stored_tensors(model.model.visual)]
    return {piece: t.detach().contiguous() for name, each in whole for piece, t in pieces(part, name, each).items()}


def check(asked: Asked, folder: Path, answers: list[Completion], models: list[Any]) -> None:
    for row, answer in enumerate(answers):
        tokens = [*asked.prompts[row], *answer.tokens.tolist()]
        with torch.no_grad():
            expected = np.stack(
                [
                    np.zeros(len(answer.tokens))
                    if PAD in answer.tokens
                    else scores_alone(model, folder, tokens, asked.files[row], len(asked.prompts[row])).numpy()
                    for model in models
                ]
            )
        if PAD in answer.tokens:  # transformers would take it for a place
            continue
        versions = np.concatenate([np.full(span.end - span.start, int(span.version)) for span in answer.versions])
        apart = np.abs(answer.logprobs - expected[versions - 1, np.arange(len(versions))])
        assert apart.max() < CLOSE, (row, versions.tolist(), apart.tolist())


IN_CHUNKS = {"max_num_batched_tokens": 40, "max_num_seqs": 16}
"""A pass sees parts of prompts, and of images."""
TIED = {"kind": "qwen3_vl", "tied": True}


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        pytest.param("recompute", TIED, marks=pytest.mark.matrix),
        ("recompute", {"kind": "qwen3_5_moe"}),
        pytest.param("recompute", {"kind": "qwen3_5"}, marks=pytest.mark.matrix),
        # test_tokens_are_of_the_images_and_of_their_adapter has Qwen2.5-VL.
        pytest.param("recompute", {}, marks=pytest.mark.matrix),
        pytest.param("keep", {}, marks=pytest.mark.matrix),
        pytest.param("keep", TIED, marks=pytest.mark.matrix),
        pytest.param("recompute", {"kind": "qwen3_vl"}, marks=pytest.mark.matrix),
        pytest.param("recompute", {"kind": "qwen3_5", "tied": True}, marks=pytest.mark.matrix),
        pytest.param("keep", {"kind": "qwen3_5"}, marks=pytest.mark.matrix),
        pytest.param("keep", {"kind": "qwen3_5_moe"}, marks=pytest.mark.matrix),
        pytest.param("recompute", {"kind": "qwen3_vl_moe"}, marks=pytest.mark.matrix),
        pytest.param("keep", {"kind": "qwen3_vl_moe", "tied": True}, marks=pytest.mark.matrix),
    ],
)
def test_tokens_are_of_the_images_and_of_their_version(
    policy: str, model: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    check_versions(policy, model, run, tmp_path, **(IN_CHUNKS if model else {}))


@pytest.mark.matrix  # test_tokens_are_of_the_images_and_of_their_version has a cache of prompts
@pytest.mark.parametrize("kind", KINDS[3:])
def test_nor_without_a_cache_of_prompts(kind: str, run: Run, tmp_path: Path) -> None:
    check_versions("recompute", {"kind": kind}, run, tmp_path, **IN_CHUNKS, enable_prefix_caching=False)


def check_versions(policy: str, model: dict[str, Any], run: Run, path: Path, **options: Any) -> None:
    folder = save_image_model(path / "0", **model)
    models = [opened_model(folder), opened_model(save_image_model(path / "1", seed=1, **model))]
    asked = Asked(folder)
    images = {"images": {"max_per_prompt": 3}, "max_prompt_tokens": 400}
    spec = job_spec(folder, "vllm", data=images, rollout={"engine_options": options} if options else {})

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, language_model(models[0]), 1)
        for _ in range(2):  # the second time prompts are cached
            check(asked, folder, await asked.answers(engine, 20), models)
        going = [asyncio.create_task(asked.answer(engine, row, 150)) for row in range(len(PROMPTS))]
        async with asyncio.timeout(300):
            while engine.load().running < len(going):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
        await receive(engine, Sender(language_model(models[1]), version=2, receivers=engine.world_size), policy)
        crossing = [await each for each in going]
        if policy == "recompute":
            check(asked, folder, crossing, models)
        for _ in range(2):
            check(asked, folder, await asked.answers(engine, 20), models)
        check(asked, folder, await asked.continued(engine), models)
        with pytest.raises(BadRow, match="vLLM makes"):
            wrong = Response(images=ShownImages(asked.images[0], PROMPTS[0][0]))
            await engine.generate([*asked.prompts[0], PAD], Sampling(3), wrong)

    started(run, spec, scenario)


TRAINED = (
    TIED,
    *(pytest.param(each, marks=pytest.mark.matrix) for each in ({}, *({"kind": kind} for kind in KINDS[2:]))),
)


@pytest.mark.parametrize("model", TRAINED)
def test_tokens_are_of_the_tower_of_their_version(model: dict[str, Any], run: Run, tmp_path: Path) -> None:
    """Whatever happens to keys and values of requests in flight, a request that comes later sees its images by the new
    tower: features of the same images, and of the same prompts, were kept."""
    seeds = range(3)
    folders = [save_image_model(tmp_path / str(n), seed=n, tower_seed=n, **model) for n in seeds]
    models, asked = [opened_model(folder) for folder in folders], Asked(folders[0])
    images = {"images": {"max_per_prompt": 3}, "max_prompt_tokens": 400}
    trainer, rollout = {"train_tower": True}, {"engine_options": IN_CHUNKS}
    spec = job_spec(folders[0], "vllm", data=images, trainer=trainer, rollout=rollout)

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, language_model(models[0], with_tower=True), 1)
        for _ in range(2):  # the second time prompts are cached
            check(asked, folders[0], await asked.answers(engine, 20), models)
        for version, policy in ((2, "recompute"), (3, "keep")):
            going = [asyncio.create_task(asked.answer(engine, row, 150)) for row in range(len(PROMPTS))]
            async with asyncio.timeout(300):
                while engine.load().running < len(going):  # noqa: ASYNC110 - the engine tells nobody
                    await asyncio.sleep(0.01)
            tensors = language_model(models[version - 1], with_tower=True)
            await receive(engine, Sender(tensors, version=version, receivers=engine.world_size), policy)
            later = await asked.answers(engine, 20)
            crossing = [await each for each in going]
            if policy == "recompute":
                check(asked, folders[0], crossing, models)
            check(asked, folders[0], later, models)
            check(asked, folders[0], await asked.answers(engine, 20), models)

    started(run, spec, scenario)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        pytest.param("recompute", "qwen2_5_vl", marks=pytest.mark.matrix),
        pytest.param("keep", "qwen2_5_vl", marks=pytest.mark.matrix),
        pytest.param("recompute", "qwen3_vl", marks=pytest.mark.matrix),
        pytest.param("keep", "qwen3_vl", marks=pytest.mark.matrix),
        pytest.param("recompute", "qwen3_5", marks=pytest.mark.matrix),
        pytest.param("keep", "qwen3_5", marks=pytest.mark.matrix),
        *(pytest.param("recompute", kind, marks=pytest.mark.matrix) for kind in KINDS[3:]),
    ],
)
def test_tokens_are_of_the_images_and_of_their_adapter(policy: str, kind: str, run: Run, tmp_path: Path) -> None:
    """What the engine keeps of images stays valid: the tower is frozen. Keys and values of images do not."""
    folder = save_image_model(tmp_path / "0", kind=kind)
    base = opened_model(folder)
    layers = language_layers(base)
    part = trained_part(base)
    adapted = [with_adapter(part, seed=seed, rank=5, alpha=16.0, targets=layers) for seed in range(2)]
    models = [base, *(whole_of(base, each.get_base_model()) for each in adapted)]
    asked = Asked(folder)
    images = {"images": {"max_per_prompt": 3}, "max_prompt_tokens": 400}
    spec = adapter_job(folder, "vllm", rank=5, data=images)

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, language_model(base), 1, content=Content.BASE)
        await publish_shards(engine, published(adapted[0]), 2, content=Content.ADAPTER)
        for _ in range(2):  # the second time prompts are cached
            check(asked, folder, await asked.answers(engine, 20), models)
        going = [asyncio.create_task(asked.answer(engine, row, 150)) for row in range(len(PROMPTS))]
        async with asyncio.timeout(300):
            while engine.load().running < len(going):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
        tensors = published(adapted[1])
        sender = Sender(tensors, version=3, content=Content.ADAPTER, receivers=engine.world_size)
        await receive(engine, sender, policy)
        crossing = [await each for each in going]
        assert any(len(answer.versions) == 2 for answer in crossing)
        if policy == "recompute":
            check(asked, folder, crossing, models)
        for _ in range(2):
            check(asked, folder, await asked.answers(engine, 20), models)
        check(asked, folder, await asked.continued(engine), models)

    started(run, spec, scenario)


@pytest.mark.matrix  # test_tokens_are_of_the_images_and_of_their_version has a prompt without images
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_text_needs_no_processor(kind: str, run: Run, tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "0", kind=kind)
    model, asked = opened_model(folder), Asked(folder)
    (folder / "preprocessor_config.json").unlink()

    async def scenario(engine: Any) -> None:
        await publish_shards(engine, language_model(model), 1)
        answer = await asked.answer(engine, 2, 40)
        with torch.no_grad():
            expected = scores_alone(model, folder, [*asked.prompts[2], *answer.tokens.tolist()], (), 4).numpy()
        assert PAD in answer.tokens or np.abs(answer.logprobs - expected).max() < CLOSE

    started(run, job_spec(folder, "vllm"), scenario)


def test_the_engine_is_prepared_for_as_many_images(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "0")
    spec = job_spec(folder, "vllm", data={"images": {"max_per_prompt": 3}, "max_prompt_tokens": 400})
    arguments = vllm_options.engine_arguments(spec)
    assert arguments.limit_mm_per_prompt["image"] == 3


def test_replicas_with_other_engines_refuse_the_job(tmp_path: Path) -> None:
    spec = job_spec(save_image_model(tmp_path / "0"), "transformers", data={"files": ["rows.jsonl"], "images": {}})
    check_images(spec, "vllm")
    for engine in ("transformers", "sglang"):
        with pytest.raises(InvalidJob, match=rf"data.images: .*the engine of this replica is {engine}"):
            check_images(spec, engine)
