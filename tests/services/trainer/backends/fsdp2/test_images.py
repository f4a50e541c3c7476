"""Prompts with images: packed and sharded, log-probabilities and gradients are what transformers computes alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from millrace.data.pictures import Pictures
from millrace.errors import InvalidJob, InvalidState
from millrace.memory.adapters import adapter_parameters, without_experts
from millrace.memory.fsdp2 import Fsdp2Memory
from millrace.memory.ledger import Part, Phase
from millrace.memory.prediction import predict, predict_replica
from millrace.memory.shape import decoder_shape
from millrace.memory.staging import published_bytes
from millrace.towers import MOST_KEPT
from millrace.weights.folder_tensors import stored_name, stored_shapes
from millrace.weights.plans.manifest import Content
from services.rollout.engines.adapter import adapter_shape
from services.trainer.backends import build
from services.trainer.backends.fsdp2 import model_check
from services.trainer.checkpoints.exported import write as write_export
from services.trainer.protocol.microbatch import MicroBatch, Sample
from tests.adapters import published, with_adapter
from tests.forked import CONTEXT
from tests.image_models import (
    END,
    KINDS,
    PAD,
    START,
    as_in_module,
    language_layers,
    opened_model,
    picture,
    save_image_model,
    scores_alone,
    trained_part,
    whole_of,
)
from tests.services.trainer.backends.fsdp2.test_recurrent import check_gradients, one_pass
from tests.services.trainer.checkpoints.saved import save, write_adapter
from tests.services.trainer.groups import job_spec

CLOSE = 1e-4
IMAGE = [START, PAD, END]
DATA = {"files": ["/rows.jsonl"], "procedural": None, "images": {"max_per_prompt": 4}, "max_prompt_tokens": 512}
TRAINER = {"token_budget": 2048}
PROMPTS: tuple[tuple[list[int], tuple[tuple[int, int], ...]], ...] = (
    ([*IMAGE, 5, 6, 7], ((90, 130),)),  # first
    ([1, 2, 3, *IMAGE], ((170, 60),)),  # last
    ([9, 8, 7, 6], ()),  # none
    ([4, *IMAGE, *IMAGE, 11, *IMAGE], ((60, 60), (200, 120), (60, 60))),  # adjacent, one of them twice
)
"""Short tokens, and width and height of each image."""


OTHERS = (*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS[2:]))
"""test_packed_is_what_each_is_alone has all."""


@pytest.fixture(scope="module", params=OTHERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "model", kind=request.param)


def drawn(folder: Path) -> list[Sample]:
    random, pictures, made = np.random.default_rng(2), Pictures.of_folder(str(folder)), []
    for number, (short, sizes) in enumerate(PROMPTS):
        files = tuple(picture(10 * number + width, width, height) for width, height in sizes)
        prompt = pictures.expanded(short, pictures.opened(files))
        response = random.integers(0, 250, 7 + 5 * number)
        if number == 1:
            response[2] = PAD  # the policy may sample the token: then it is text
        scores = np.zeros(len(response), np.float32)
        sample = Sample(f"sample {number}", np.array(prompt, np.int32), response.astype(np.int32), scores, 0.0)
        made.append(Sample(**{**vars(sample), "images": files}))
    return made


def alone(folder: Path, samples: list[Sample], model: Any = None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model, found = model or opened_model(folder), []
    for sample in samples:
        tokens = [*sample.prompt.tolist(), *sample.response.tolist()]
        if sample.label == "sample 1":
            # transformers takes every token of images for a place: the sampled one is given as its embedding.
            found.append(with_sampled_pad(model, folder, sample))
        else:
            found.append(scores_alone(model, folder, tokens, sample.images, len(sample.prompt)))
    (-torch.cat(found).sum() / 50).backward()
    parts = [("", trained_part(model)), ("model.visual.", model.model.visual)]
    named = [(prefix + name, p.grad) for prefix, part in parts for name, p in part.named_parameters()]
    gradients = {name: gradient for name, gradient in named if gradient is not None}
    return [each.detach() for each in found], gradients


def with_sampled_pad(model: Any, folder: Path, sample: Sample) -> torch.Tensor:
    """By embeddings: those of text from the table, those of the image from the tower."""
    pictures = Pictures.of_folder(str(folder))
    ids = torch.tensor([[*sample.prompt.tolist(), *sample.response.tolist()]])
    kinds = (ids == PAD).int()
    kinds[:, len(sample.prompt) :] = 0
    patches, grid = pictures.pixels(pictures.opened(sample.images))
    made = model.model.get_image_features(patches, grid, return_dict=True)
    features = torch.cat(list(made.pooler_output))
    embedded = model.get_input_embeddings()(ids).masked_scatter(kinds[..., None].bool(), features)
    positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
    later = {}
    if hasattr(made, "deepstack_features"):
        of_layers = [torch.cat(list(each)) for each in made.deepstack_features]
        later = {"visual_pos_masks": kinds.bool(), "deepstack_visual_embeds": of_layers}
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **later)
    scores = model.lm_head(hidden.last_hidden_state)[0].log_softmax(-1)
    return scores[:-1].gather(1, ids[0, 1:, None])[len(sample.prompt) - 1 :, 0]


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_packed_is_what_each_is_alone(one_rank: torch.device, folder: Path) -> None:
    samples = drawn(folder)
    backend: Any = build(job_spec(folder, data=DATA, trainer={**TRAINER, "activation_recompute": True}), one_rank)
    logprobs, gradients = one_pass(backend, MicroBatch.pack(samples, range(len(samples))))
    expected, expected_gradients = alone(folder, samples)
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=CLOSE, rtol=0)
    check_gradients(gradients, expected_gradients)
    reference = backend.logprobs([MicroBatch.pack(samples, [3, 0])], temperature=1.0)
    torch.testing.assert_close(reference[0], torch.cat([expected[3], expected[0]]), atol=CLOSE, rtol=0)
    stored = stored_shapes(folder)
    published = {stored_name(info.name, stored): info.shape for info, _ in backend.export("float32")}
    assert published == {name: shape for name, shape in stored.items() if "visual" not in name}


def test_positions_of_the_row_alone_would_be_wrong(one_rank: torch.device, folder: Path) -> None:
    """Of images or of text: the oracle sees both."""
    samples = drawn(folder)
    backend: Any = build(job_spec(folder, data=DATA, trainer=TRAINER), one_rank)
    expected = torch.cat(alone(folder, samples)[0])
    whole = backend._tower.inputs(MicroBatch.pack(samples, range(len(samples))))
    places, features = whole["image_features"]
    assert len(features) == len(getattr(opened_model(folder).config.vision_config, "deepstack_visual_indexes", ())) + 1
    less = [{"image_features": (places, features[:layers])} for layers in range(1, len(features))]
    for broken in ({"position_ids": None}, {"image_features": None}, *less):
        given = {name: value for name, value in {**whole, **broken}.items() if value is not None}
        backend._tower.inputs = lambda batch, given=given: given
        (found,) = backend.logprobs([MicroBatch.pack(samples, range(len(samples)))], temperature=1.0)
        assert float((found - expected).abs().max()) > 100 * CLOSE, broken


def test_the_tower_is_in_the_memory_that_is_held_and_predicted(one_rank: torch.device, folder: Path) -> None:
    """Within 1 % of the tower. A job of text has none."""
    tower = sum(each.numel() for each in opened_model(folder).model.visual.parameters())
    shape, spec = decoder_shape(folder), job_spec(folder, data=DATA, trainer=TRAINER)
    of_text = job_spec(folder)
    assert shape.tower is not None and shape.tower.parameters == tower
    backend, without = build(spec, one_rank), build(of_text, one_rank)
    held = [sum(each.nbytes for each in own.held()[Part.WEIGHTS]) for own in (backend, without)]
    assert held[0] - held[1] == 4 * tower
    for phase in (Phase.LOAD, Phase.UPDATE):
        found = [predict(own, shape, 1)[phase].device[Part.WEIGHTS] for own in (spec, of_text)]
        assert found[0] - found[1] == pytest.approx(4 * tower, rel=0.01), phase
    trained = job_spec(folder, data=DATA, trainer={**TRAINER, "train_tower": True})
    for own in (spec, trained):
        engines = [predict_replica(each, shape, "vllm", 80e9).ledger.device[Part.WEIGHTS] for each in (own, of_text)]
        assert engines[0] - engines[1] == pytest.approx(4 * tower, rel=0.01)
    assert published_bytes(trained, shape) - published_bytes(spec, shape) == pytest.approx(4 * tower, rel=0.01)
    whole = build(trained, one_rank)
    assert whole.parameters - without.parameters == tower
    one_pass(whole, MicroBatch.pack(drawn(folder), range(len(PROMPTS))))
    whole.prepare_update()
    held = {part: sum(each.nbytes for each in tensors) for part, tensors in whole.held().items()}
    found = predict(trained, shape, 1)[Phase.UPDATE].device
    for part in (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER):
        assert found[part] == pytest.approx(held[part], rel=0.01), part
    assert [predict(trained, shape, ranks)[Phase.LOAD].device[Part.WEIGHTS] for ranks in (1, 4)] == pytest.approx(
        [held[Part.WEIGHTS], held[Part.WEIGHTS] / 4], rel=0.01
    )


def test_flops_of_the_tower_are_those_of_each_image_once(one_rank: torch.device, folder: Path) -> None:
    samples = drawn(folder)
    backend: Any = build(job_spec(folder, data=DATA, trainer=TRAINER), one_rank)
    pictures, model = Pictures.of_folder(str(folder)), opened_model(folder).model.visual
    model.set_attn_implementation("eager")
    expected = 0
    for file in {file for sample in samples for file in sample.images}:
        patches, grid = pictures.pixels(pictures.opened([file]))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(patches, grid_thw=grid)
        expected += counter.get_total_flops()
    for _ in range(2):  # the features are kept
        backend.logprobs([MicroBatch.pack(samples, range(len(samples)))], temperature=1.0)
        assert backend.tower_flops == pytest.approx(expected, rel=0.01)
    assert expected > 0
    trained: Any = build(job_spec(folder, data=DATA, trainer={**TRAINER, "train_tower": True}), one_rank)
    batch = MicroBatch.pack(samples, range(len(samples)))
    trained.logprobs([batch], temperature=1.0)
    assert trained.tower_flops == pytest.approx(expected, rel=0.01)
    one_pass(trained, batch)
    assert trained.tower_flops == pytest.approx(4 * expected, rel=0.01)


def test_what_an_image_needs_in_the_tower_is_predicted(folder: Path) -> None:
    """The largest that a prompt may have: by its own limit, or by the processor's."""
    shape = decoder_shape(folder)
    assert shape.tower is not None
    for longest, patches in ((16, 64), (512, 96)):
        data, trainer = {**DATA, "max_prompt_tokens": longest}, {**TRAINER, "token_budget": longest + 24}
        job = Fsdp2Memory(job_spec(folder, data=data, trainer=trainer), shape, 1, longest + 24)
        assert job.seeing().device == {Part.ACTIVATIONS: shape.tower.working_bytes(patches, 4)}
        assert job.at_rest().device[Part.ACTIVATIONS] == MOST_KEPT
        large = replace(shape.tower, ffn=100_000)  # takes more than the language model
        seeing = replace(job, shape=replace(shape, tower=large))
        for found in (seeing.scoring(), seeing.update()):
            assert found.device[Part.ACTIVATIONS] == MOST_KEPT + large.working_bytes(patches, 4)
    trainer = {**TRAINER, "train_tower": True, "token_budget": 2 * 276}
    trained = Fsdp2Memory(job_spec(folder, data=DATA | {"max_prompt_tokens": 256}, trainer=trainer), shape, 1, 2 * 276)
    longest = 256 + trained.spec.rollout.max_response_tokens
    several = max(1, 2 * 276 // longest) * 4 * 96
    assert trained.seeing().device == {Part.ACTIVATIONS: shape.tower.working_bytes(several, 4)}
    kept = (
        trained.update().device[Part.ACTIVATIONS]
        - replace(trained, shape=replace(shape, tower=None)).update().device[Part.ACTIVATIONS]
    )
    assert kept == MOST_KEPT + shape.tower.kept_bytes(several, 4, recompute=False)
    of_text = Fsdp2Memory(job_spec(folder), shape, 1, 40)
    assert not of_text.seeing().device and Part.ACTIVATIONS not in of_text.at_rest().device


def with_language_adapter(folder: Path, seed: int, targets: list[str] | None = None) -> Any:
    """The model in PEFT with an adapter on the language model's linear layers, or on `targets`."""
    base = opened_model(folder)
    layers = targets or language_layers(base)
    return with_adapter(trained_part(base), seed=seed, rank=3, alpha=6.0, targets=layers)


def with_saved_adapter(folder: Path, adapter: Path) -> Any:
    """The whole model with an adapter that PEFT reads."""
    base = opened_model(folder)
    return whole_of(base, PeftModel.from_pretrained(trained_part(base), adapter, is_trainable=True).get_base_model())


DORA = {"rank": 2, "alpha": 8, "dora": True, "merge": True, "target_modules": ["q_proj", "up_proj"]}


def of_model(folder: Path, lora: dict[str, Any]) -> dict[str, Any]:
    """Without the names for which the model has no layer: experts have no adapter."""
    layers = language_layers(opened_model(folder))
    known = {
        name: [one for one in lora[name] if any(layer.endswith(one) for layer in layers)]
        for name in lora.keys() & {"target_modules"}
    }
    return lora | known


@pytest.mark.parametrize(("lora", "recompute"), [({"rank": 4, "alpha": 8}, False), (DORA, True)], ids=["lora", "dora"])
def test_an_adapter_is_trained_as_peft_does(
    one_rank: torch.device, folder: Path, tmp_path: Path, lora: dict[str, Any], recompute: bool
) -> None:
    """From the same first adapter, in packed rows. PEFT reads what is saved; merged weights compute the same."""
    samples = drawn(folder)
    batch = MicroBatch.pack(samples, range(len(samples)))
    eps = 1e-5  # Adam divides by a gradient's size: with less, the rounding of small gradients would grow to 1e-4
    trainer = {**TRAINER, "activation_recompute": recompute, "optimizer": {"eps": eps}}
    lora = of_model(folder, lora)
    spec = job_spec(folder, model={"lora": lora}, data=DATA, trainer=trainer, algorithm={"kl": {"name": "k3"}})
    backend: Any = build(spec, one_rank)
    write_adapter(tmp_path / "start", backend.adapter, folder)
    model = with_saved_adapter(folder, tmp_path / "start")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), eps=eps, weight_decay=0.01)
    for _ in range(3):
        one_pass(backend, batch)
        backend.optimizer_step(lr=5e-3, gradient_scale=1.0)
        alone(folder, samples, model)
        optimizer.step()
        optimizer.zero_grad()
    (found,) = backend.logprobs([batch], temperature=1.0)
    expected = torch.cat(alone(folder, samples, model)[0])
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=0)
    begun = torch.cat(alone(folder, samples)[0])
    assert float((expected - begun).abs().max()) > 100 * CLOSE
    (reference,) = backend.logprobs([batch], temperature=1.0, reference=True)
    torch.testing.assert_close(reference, begun, atol=CLOSE, rtol=0)

    write_adapter(tmp_path / "saved", backend.adapter, folder)
    again = with_saved_adapter(folder, tmp_path / "saved")
    read = {name for name, _ in trained_part(again).named_modules() if name.endswith("lora_A")}
    ends = tuple(lora.get("target_modules", ("proj",)))
    layers = (layer for layer in language_layers(opened_model(folder)) if layer.endswith(ends))
    assert read == {f"{layer}.lora_A" for layer in layers}
    torch.testing.assert_close(torch.cat(alone(folder, samples, again)[0]), found, atol=CLOSE, rtol=0)
    merged = opened_model(folder)
    exported = {info.name: tensor for info, tensor in backend.export("float32")}
    unknown = trained_part(merged).load_state_dict(as_in_module(merged, exported), strict=False)
    assert not unknown.unexpected_keys and all(".visual." in name for name in unknown.missing_keys)
    save(tmp_path / "checkpoint", backend, 3, folder)
    write_export(tmp_path / "checkpoint", tmp_path / "exported")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    for whole in (merged, opened_model(tmp_path / "exported")):
        torch.testing.assert_close(torch.cat(alone(folder, samples, whole)[0]), found, atol=CLOSE, rtol=0)


def test_the_adapter_of_a_folder_is_published_as_the_engine_awaits_it(
    one_rank: torch.device, folder: Path, tmp_path: Path
) -> None:
    adapted = with_language_adapter(folder, 1)
    adapted.save_pretrained(tmp_path)
    spec = job_spec(folder, model={"lora": {"adapter_path": str(tmp_path)}}, data=DATA, trainer=TRAINER)
    backend: Any = build(spec, one_rank)
    sent = {info.name: tensor for info, tensor in backend.adapter.parts[Content.ADAPTER].export("float32")}
    expected = published(adapted)
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor, atol=1e-6, rtol=1e-6)
    shape = adapter_shape(spec)
    assert shape is not None and spec.model.lora is not None
    assert adapter_parameters(decoder_shape(folder), spec.model.lora) == backend.parameters
    shape.check(backend.adapter.parts[Content.ADAPTER].manifest("float32"), "float32")
    base = {info.name for info, _ in backend.adapter.parts[Content.BASE].export("float32")}
    assert base == {info.name for info, _ in build(job_spec(folder), one_rank).export("float32")}


@pytest.mark.parametrize(
    ("lora", "ends"),
    [
        ({}, ("proj",)),
        ({"target_modules": ["q_proj", "down_proj"]}, ("q_proj", "down_proj")),
        ({"target_modules": ["linear_fc1"]}, ("gate_proj", "up_proj")),
    ],
)
def test_trainer_engine_and_ledger_mean_the_language_model_s_layers(
    one_rank: torch.device, folder: Path, lora: dict[str, Any], ends: tuple[str, ...]
) -> None:
    """A name that the tower has too, as `down_proj` and Megatron's `linear_fc1`, means no layer of it. Nor does it mean
    experts."""
    model = opened_model(folder)
    excluded = ["qkv"] if trained_part(model) is model else []  # of the tower, where that is built and taken out
    lora = {**lora, "rank": 4, "exclude_modules": excluded}
    spec = job_spec(folder, model={"lora": lora}, data=DATA, trainer=TRAINER)
    if not all(any(layer.endswith(end) for layer in language_layers(model)) for end in ends):
        for check in (model_check.check, adapter_shape, lambda spec: build(spec, one_rank)):
            with pytest.raises(InvalidJob, match=r"model\.lora\.target_modules"):
                check(spec)
        return
    backend: Any = build(spec, one_rank)
    model_check.check(spec)
    named = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name, _ in backend.adapter.export()}
    assert named == {name for name in language_layers(model) if name.endswith(ends)}
    served = adapter_shape(spec)
    assert served is not None and {layer.name for layer in served.layers} == named
    assert spec.model.lora is not None
    assert adapter_parameters(decoder_shape(folder), without_experts(spec.model.lora)) == backend.parameters
    held = {part: sum(each.nbytes for each in tensors) for part, tensors in backend.held().items()}
    found = predict(spec, decoder_shape(folder), 1)[Phase.UPDATE].device
    assert found[Part.WEIGHTS] == pytest.approx(held[Part.WEIGHTS], rel=0.02)


def test_layers_of_the_tower_are_refused_by_name(one_rank: torch.device, folder: Path, tmp_path: Path) -> None:
    def refused(lora: dict[str, Any], message: str, *more: Any) -> None:
        spec = job_spec(folder, model={"lora": lora}, data=DATA, trainer=TRAINER)
        for check in (model_check.check, lambda spec: build(spec, one_rank), *more):
            with pytest.raises(InvalidJob, match=message):
                check(spec)

    frozen = "is in the model's tower for images, which is frozen and has no adapter"
    whole, of_tower = opened_model(folder), "model.visual.blocks.0.attn.qkv"
    named, stored = f"attn.qkv {frozen}", f"its {of_tower} {frozen}"
    if trained_part(whole) is not whole:  # trainer and engine build the model without any layer of the tower
        named, stored = '"attn.qkv": no linear layer', "is no linear layer of this model"
    refused({"target_modules": ["q_proj", "attn.qkv"]}, f"target_modules: .*{named}", adapter_shape)
    with_adapter(whole, seed=1, rank=3, alpha=6.0, targets=["q_proj", "qkv"]).save_pretrained(tmp_path)
    refused({"adapter_path": str(tmp_path)}, f"adapter_path: .*{stored}")


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "whole": (False, {}),
    "adapter": (True, {}),
    "tower": (False, {"train_tower": True, "activation_recompute": True}),
}
"""Whether an adapter is trained, and options of the trainer."""


EPS = 1e-2
"""Of AdamW. With less the sign of a gradient that is next to nothing, and so rounding, decides the first update."""
UPDATED = (KINDS[0], *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("qwen3_vl", "qwen3_vl_moe")))
"""The two ranks of test_a_rank_without_images_… have the gradients of each in the matrix. The tiny Qwen3.5 makes too
much of rounding in two updates, with a frozen tower as well."""


@pytest.mark.parametrize("folder", UPDATED, indirect=True)
def test_a_tower_is_trained_as_transformers_does(one_rank: torch.device, folder: Path, tmp_path: Path) -> None:
    """With the language model, after two updates. The reference has the first tower; exports have the last."""
    samples = drawn(folder)
    batch = MicroBatch.pack(samples, range(len(samples)))
    trainer = {**TRAINER, "train_tower": True, "optimizer": {"eps": EPS}}
    backend: Any = build(job_spec(folder, data=DATA, trainer=trainer, algorithm={"kl": {"name": "k3"}}), one_rank)
    model = opened_model(folder, train_tower=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPS, weight_decay=0.01)
    for _ in range(2):
        one_pass(backend, batch)
        backend.optimizer_step(lr=1e-2, gradient_scale=1.0)
        alone(folder, samples, model)
        optimizer.step()
        optimizer.zero_grad()
    (found,) = backend.logprobs([batch], temperature=1.0)
    torch.testing.assert_close(found, torch.cat(alone(folder, samples, model)[0]), atol=CLOSE, rtol=0)
    begun = torch.cat(alone(folder, samples)[0])
    assert float((found - begun).abs().max()) > 100 * CLOSE
    (reference,) = backend.logprobs([batch], temperature=1.0, reference=True)
    torch.testing.assert_close(reference, begun, atol=CLOSE, rtol=0)

    save(tmp_path / "checkpoint", backend, 2, folder)
    write_export(tmp_path / "checkpoint", tmp_path / "exported")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    same = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert not any(".visual." in name for name in same), same
    exported = torch.cat(alone(folder, samples, opened_model(tmp_path / "exported"))[0])
    torch.testing.assert_close(exported, found, atol=CLOSE, rtol=0)


def on_rank(rank: int, place: Path, model: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(place / "store"), 2), rank=rank, world_size=2)
    mine = [2] if rank else [0, 1, 3]  # the second rank has no image
    for name, (own, trainer) in CASES.items():
        lora = {"lora": {"adapter_path": str(place / "peft")} if own else None}
        backend = build(job_spec(model, model=lora, data=DATA, trainer={**TRAINER, **trainer}), torch.device("cpu"))
        logprobs, gradients = one_pass(backend, MicroBatch.pack(drawn(model), mine))
        save_file({**gradients, "logprobs": logprobs}, place / f"{name} {rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS[1:])], indirect=True
)  # test_packed_is_what_each_is_alone has all, on one rank
def test_a_rank_without_images_computes_with_one_that_has_some(folder: Path, tmp_path: Path) -> None:
    adapted = with_language_adapter(folder, 1)
    adapted.save_pretrained(tmp_path / "peft")
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, tmp_path, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    model = whole_of(opened_model(folder), adapted.get_base_model())
    models = {"whole": None, "adapter": model, "tower": opened_model(folder, train_tower=True)}
    oracles = {name: alone(folder, drawn(folder), each) for name, each in models.items()}
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    for name, (expected, gradients) in oracles.items():
        for rank, mine in enumerate(([0, 1, 3], [2])):
            found = load_file(tmp_path / f"{name} {rank}.safetensors")
            of_rank = torch.cat([expected[row] for row in mine])
            torch.testing.assert_close(found.pop("logprobs"), of_rank, atol=CLOSE, rtol=0)
            check_gradients(found, gradients)


def test_images_that_need_more_places_are_refused(one_rank: torch.device, folder: Path) -> None:
    sample = drawn(folder)[0]
    backend: Any = build(job_spec(folder, data=DATA, trainer=TRAINER), one_rank)
    short = Sample(**{**vars(sample), "prompt": sample.prompt[sample.prompt != PAD]})
    with pytest.raises(InvalidState, match="a sequence has 0 tokens of images, and its images make"):
        backend.logprobs([MicroBatch.pack([short], [0])], temperature=1.0)


def test_attention_that_does_not_learn_of_borders_is_refused(one_rank: torch.device, folder: Path) -> None:
    """`sdpa` would need positions of another shape for Qwen2.5-VL."""
    model_check.check(job_spec(folder, data=DATA, trainer=TRAINER))
    model_check.check(job_spec(folder))
    by_mask = {**TRAINER, "backend_options": {"attention": "sdpa"}}
    if opened_model(folder).config.model_type != "qwen2_5_vl":
        samples = drawn(folder)
        backend: Any = build(job_spec(folder, data=DATA, trainer=by_mask), one_rank)
        (found,) = backend.logprobs([MicroBatch.pack(samples, range(len(samples)))], temperature=1.0)
        torch.testing.assert_close(found, torch.cat(alone(folder, samples)[0]), atol=CLOSE, rtol=0)
        return
    with pytest.raises(InvalidJob, match=r"with sdpa attention, differs by .* nats"):
        model_check.check(job_spec(folder, trainer={"backend_options": {"attention": "sdpa"}}))
