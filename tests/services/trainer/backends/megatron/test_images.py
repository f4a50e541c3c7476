"""Prompts with images on Megatron: packed, in every topology, log-probabilities and gradients are what transformers
computes of each sequence alone, in float32. The sequences are those of FSDP2's test."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from millrace.backends.megatron import parse
from millrace.data.pictures import Pictures
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import check
from millrace.megatron.topology import Topology
from millrace.memory.ledger import Part, fullest
from millrace.memory.megatron import StageMemory, Use
from millrace.memory.shape import decoder_shape
from millrace.towers import MOST_KEPT
from tests.image_models import KINDS, opened_model, save_image_model, trained_part
from tests.services.trainer.backends.fsdp2.test_images import CLOSE, alone, drawn, with_saved_adapter
from tests.services.trainer.backends.fsdp2.test_recurrent import check_gradients
from tests.services.trainer.backends.megatron.launch import launch, once
from tests.services.trainer.backends.megatron.on_ranks import image_job

pytestmark = pytest.mark.timeout(400)
LORA = {"rank": 4, "alpha": 8}
DEEP = "qwen2_5_vl, tied"
"""Kind of a model with four layers."""
SEEING, LONG = "qwen3_vl", "qwen3_vl, long"
"""Kinds of models of which the first two layers add features of images: of three layers, and of eight."""
FIRST = {"pipeline_parallel": 2, "first_stage_layers": 2}
SPLIT = {"context_parallel": 2, "distributed_optimizer": False}
FULL = {"recompute": {"granularity": "full"}}
CASES: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]]] = {
    "2": {
        "TP2": ("qwen2_5_vl", {"tensor_parallel": 2}, None),
        "PP2": ("qwen3_5", {"pipeline_parallel": 2, "first_stage_layers": 1, **FULL}, None),
        "TP2 deepstack": (SEEING, {"tensor_parallel": 2, **FULL}, None),
    },
    "1, the rest": {
        "alone": ("qwen2_5_vl", FULL, None),
        "GDN": ("qwen3_5", {}, None),
        "LoRA": ("qwen2_5_vl", FULL, LORA),
        "LoRA, GDN": ("qwen3_5", {}, LORA),
        "deepstack": (SEEING, {}, None),
        "LoRA, deepstack": (SEEING, FULL, LORA),
    },
    "2, the rest": {
        "TP2 without sequence parallelism": ("qwen2_5_vl", {"tensor_parallel": 2, "sequence_parallel": False}, None),
        "PP2 dense": ("qwen2_5_vl", {"pipeline_parallel": 2}, None),
        "VPP2 tied": (DEEP, {"pipeline_parallel": 2, "virtual_pipeline": 2}, None),
        "DP2": ("qwen2_5_vl", {"distributed_optimizer": False}, None),
        "DP2, GDN": ("qwen3_5", {"distributed_optimizer": False}, None),
        "LoRA TP2": ("qwen2_5_vl", {"tensor_parallel": 2}, LORA),
        "LoRA PP2": ("qwen2_5_vl", {"pipeline_parallel": 2, **FULL}, LORA),
        "TP2 deepstack without sequence parallelism": (
            SEEING,
            {"tensor_parallel": 2, "sequence_parallel": False},
            None,
        ),
        "PP2 deepstack": (SEEING, {**FIRST, **FULL}, None),
        "VPP2 deepstack tied": (LONG, {"pipeline_parallel": 2, "virtual_pipeline": 2}, None),
        "CP2": ("qwen2_5_vl", SPLIT, None),
        "CP2 deepstack": (SEEING, {**SPLIT, **FULL}, None),
        "LoRA CP2 deepstack": (SEEING, {"context_parallel": 2}, LORA),
        "DP2, deepstack": (SEEING, {"distributed_optimizer": False}, None),
        "LoRA TP2 deepstack": (SEEING, {"tensor_parallel": 2}, LORA),
        "LoRA PP2 deepstack": (SEEING, {**FIRST, **FULL}, LORA),
    },
    "4": {
        "TP2 PP2": ("qwen2_5_vl", {"tensor_parallel": 2, "pipeline_parallel": 2}, None),
        "TP2 PP2 deepstack": (SEEING, {"tensor_parallel": 2, **FIRST}, None),
        "CP2 TP2 deepstack": (SEEING, {**SPLIT, "tensor_parallel": 2}, None),
    },
}
"""Launch, which begins with its number of ranks → case → kind of model, options, adapter. A distributed optimizer would
keep each gradient on one data-parallel or context-parallel rank."""
ON_RANKS = pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=[pytest.mark.matrix] * (group != "2"), id=f"{group[0]} ranks, {name}")
        for group, cases in CASES.items()
        for name in cases
    ],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("images")
    kinds = {kind: save_image_model(made / kind, kind=kind) for kind in KINDS}
    long = save_image_model(made / "long", kind=SEEING, tied=True, layers=8)
    return {**kinds, DEEP: save_image_model(made / "deep", tied=True, layers=4), LONG: long}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str], Any]:
    return once(lambda kind: alone(folders[kind], drawn(folders[kind])))


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    @once
    def launched(group: str) -> tuple[Any, Path]:
        cases = {
            name: {"model": str(folders[kind]), "options": options, "lora": lora}
            for name, (kind, options, lora) in CASES[group].items()
        }
        folder = tmp_path_factory.mktemp("ranks")
        return launch(int(group[0]), folder, images={"cases": cases})["images"], folder

    return launched


@ON_RANKS
def test_packed_is_what_each_is_alone(
    group: str, name: str, ranks: Any, expected: Any, folders: dict[str, Path]
) -> None:
    """Without what layers add the first tokens after images differ, by 0.1 nats and more."""
    (answers, folder), (kind, _, lora) = ranks(group), CASES[group][name]
    logprobs, gradients = expected(kind)
    assert answers[name]["reference"] == pytest.approx(torch.cat(logprobs).tolist(), abs=CLOSE)
    without = np.abs(np.subtract(answers[name]["without"], answers[name]["reference"])).max()
    assert without > 1000 * CLOSE if kind in (SEEING, LONG) else without == 0
    if lora is not None:
        check_adapter(answers[name], folder / name, folders[kind])
        return
    assert answers[name]["logprobs"] == answers[name]["reference"]
    passed = load_file(folder / f"{name}.safetensors")
    in_folder = {name.replace("model.language_model.", "model."): each for name, each in gradients.items()}
    check_gradients(passed, in_folder)


def check_adapter(answer: dict[str, Any], files: Path, folder: Path) -> None:
    """Three updates by PEFT from the same first adapter; PEFT reads what is saved, and merged weights compute the
    same."""
    model = with_saved_adapter(folder, files / "start")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(3):
        alone(folder, drawn(folder), model)
        optimizer.step()
        optimizer.zero_grad()
    merged = opened_model(folder)
    exported = load_file(files.with_suffix(".safetensors"))
    in_module = {name.replace("model.", "model.language_model.", 1): each for name, each in exported.items()}
    whole = trained_part(merged) is merged
    unknown = trained_part(merged).load_state_dict(in_module if whole else exported, strict=False)
    assert all(".visual." in name for name in unknown.missing_keys)
    for computed in (model, with_saved_adapter(folder, files / "saved"), merged):
        found = torch.cat(alone(folder, drawn(folder), computed)[0])
        assert answer["logprobs"] == pytest.approx(found.tolist(), abs=CLOSE)
    assert max(abs(a - b) for a, b in zip(answer["logprobs"], answer["reference"], strict=True)) > 100 * CLOSE


@ON_RANKS
def test_ranks_of_the_first_stage_hold_the_tower(group: str, name: str, ranks: Any, folders: dict[str, Path]) -> None:
    """As predicted. Each sees the images of its sequences once, by the micro-batches of a pass and by all passes."""
    (answers, _), (kind, options, lora) = ranks(group), CASES[group][name]
    spec = image_job({"model": str(folders[kind]), "options": options, "lora": lora})
    shape, held = decoder_shape(folders[kind]), answers[name]["held"]
    topology = Topology(len(held), parse(options))
    for rank, found in enumerate(held):
        place = topology.coordinates(rank)
        stage = StageMemory(spec, topology, shape, place.pipeline, 512)
        predicted = stage.all_models(Use.NONE, Use.NONE).device[Part.WEIGHTS]
        assert found["weights"] == pytest.approx(predicted, rel=0.02)
        without = replace(stage, shape=replace(shape, tower=None)).all_models(Use.NONE, Use.NONE)
        first = place.pipeline == 0
        assert shape.tower is not None
        assert predicted - without.device[Part.WEIGHTS] == first * 4 * shape.tower.parameters
        rows = [[0, 1, 3], [2]][place.data] if topology.data_parallel == 2 else [0, 1, 2, 3]
        files = {file for row in rows for file in drawn(folders[kind])[row].images}
        flops = [sum(map(shape.tower.flops, grids_of(folders[kind], file))) for file in files]
        assert found["flops"] == pytest.approx(first * sum(flops))


def grids_of(folder: Path, file: bytes) -> list[tuple[int, int, int]]:
    pictures = Pictures.of_folder(str(folder))
    return pictures.pixels(pictures.opened([file]))[1].tolist()  # type: ignore[no-any-return]


def test_what_an_image_needs_in_the_tower_is_predicted(folders: dict[str, Path]) -> None:
    """On the first of two stages it comes on top of the activations of the other micro-batch."""
    options = {"pipeline_parallel": 2}
    folder = folders["qwen2_5_vl"]
    spec, shape = image_job({"model": str(folder), "options": options}), decoder_shape(folder)
    assert shape.tower is not None
    large = replace(shape, tower=replace(shape.tower, ffn=1_000_000))  # takes more than the language model
    working = large.tower.working_bytes(shape.tower.most_patches, 4)  # type: ignore[union-attr]
    first, last = (StageMemory(spec, Topology(2, parse(options)), large, stage, 512) for stage in (0, 1))
    passing = [fullest(list(moments)).device[Part.ACTIVATIONS] for moments in (first.scoring(), first.update())]
    assert passing == [MOST_KEPT + working, MOST_KEPT + working + first.activations()[0] / 2]
    assert all(moment.device.get(Part.ACTIVATIONS, 0.0) < working for moment in (*last.scoring(), *last.update()))


def test_features_of_the_first_layers_are_predicted(folders: dict[str, Path]) -> None:
    """On the first of two stages, in both micro-batches that it has at a time. A job of text has none."""
    options, shape = {"tensor_parallel": 2, **FIRST, **FULL}, decoder_shape(folders[SEEING])
    spec = image_job({"model": str(folders[SEEING]), "options": options})
    stages = [StageMemory(spec, Topology(4, parse(options)), shape, stage, 512) for stage in (0, 1)]
    of_text = [replace(stage, shape=replace(shape, deepstack_layers=0)) for stage in stages]
    whole, split = 3 * shape.hidden * 512 * 4, 2
    kept = [stage.activations()[0] - text.activations()[0] for stage, text in zip(stages, of_text, strict=True)]
    assert kept == [2 * whole / split, 0.0]
    passing = [
        stage.forward().device[Part.ACTIVATIONS] - text.forward().device[Part.ACTIVATIONS]
        for stage, text in zip(stages, of_text, strict=True)
    ]
    assert passing == [whole / split, 0.0]


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"pipeline_parallel": 2, "first_stage_layers": 1}, "set it to 2 or more, or lower pipeline_parallel"),
        ({"pipeline_parallel": 8}, "set it to 2 or more, or lower pipeline_parallel"),
        ({"pipeline_parallel": 4, "virtual_pipeline": 2}, "set it to 4 or more, or lower virtual_pipeline"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, None),
        ({"pipeline_parallel": 3}, "set first_stage_layers and last_stage_layers"),
        ({"tensor_parallel": 2}, None),
    ],
)
def test_layers_that_add_features_lie_on_the_first_stage(
    options: dict[str, Any], fix: str | None, folders: dict[str, Path]
) -> None:
    """Eight layers, of which the first two add some. Text alone may be divided in any way."""
    shape = read_shape(folders[LONG])
    if fix is None:
        check(parse(options), shape, None, cuda=True, images=True)
        return
    with pytest.raises(InvalidJob, match=f"Fix: {fix}") as refused:
        check(parse(options), shape, None, cuda=True, images=True)
    assert len(refused.value.mistakes) == 1
    if options != {"pipeline_parallel": 3}:
        assert "first_stage_layers" in refused.value.what
        check(parse(options), shape, None, cuda=True)


def test_what_is_refused(folders: dict[str, Path]) -> None:
    shape, options = read_shape(folders["qwen2_5_vl"]), parse({})
    check(options, shape, None, cuda=True, images=True)
    without = replace(shape, rope=replace(shape.rope, sections=(4, 4, 4)))
    check(options, without, None, cuda=True)
    with pytest.raises(InvalidJob, match=r"mrope_section = \[4, 4, 4\], and images need three numbers with the sum 16"):
        check(options, without, None, cuda=True, images=True)
