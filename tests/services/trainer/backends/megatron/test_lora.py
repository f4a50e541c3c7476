"""LoRA on Megatron's layers: in every topology the same adapter as FSDP2 trains with PEFT's layers from the same seed.

Three updates in float32. Tolerances: log-probabilities 2e-5, the loss and the gradient's norm 2e-5 of their size, the
adapter 1e-4 (a hundredth of the learning rate).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration

from services.trainer.checkpoints import exported
from tests.services.trainer.backends.megatron.batch import loss_of
from tests.services.trainer.backends.megatron.launch import launch, once
from tests.services.trainer.backends.megatron.plain import scores

LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
LORA: dict[str, dict[str, Any]] = {
    "qwen3": {"rank": 4, "alpha": 8},
    "qwen3_moe": {
        **{"rank": 3, "alpha": 6, "rslora": True, "init": "gaussian"},
        **{"target_modules": ["linear_qkv", "o_proj"], "exclude_modules": ["k_proj"]},
    },
    "deepseek_v3": {"rank": 4, "alpha": 8, "target_modules": LATENT},
    "qwen3_5": {"rank": 4, "alpha": 8},
    "experts": {"rank": 2, "alpha": 4, "target_modules": ["v_proj", "experts"], "merge": True},
}
"""Kind of model → the adapter that it is trained with. Without k_proj some rows of linear_qkv have none."""
MODELS = {**{kind: kind for kind in LORA}, "experts": "qwen3_moe"}
EXPECTED = {**{kind: f"fsdp2 {kind}" for kind in LORA}, "experts": "experts"}
"""The case of one rank that others are held against: transformers' fused experts have no adapters on FSDP2."""
FULL = {"recompute": {"granularity": "full"}}
SELECTIVE = {"recompute": {"granularity": "selective", "modules": ["core_attn", "mlp"]}}
CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "1": {
        "alone": ("qwen3", {}),
        "MoE": ("qwen3_moe", SELECTIVE),
        "MLA": ("deepseek_v3", {}),
        "GDN": ("qwen3_5", {}),
        "experts": ("experts", {}),
    },
    "1, the rest": {"recomputed": ("qwen3", {**FULL, "offload_parameters": True})},
    "2": {
        "TP2": ("qwen3", {"tensor_parallel": 2}),
        "PP2": ("qwen3", {"pipeline_parallel": 2, **FULL}),
        "experts EP2": ("experts", {"expert_parallel": 2}),
    },
    "2, the rest": {
        "MoE EP2": ("qwen3_moe", {"expert_parallel": 2, "distributed_optimizer": False}),
        "MLA TP2": ("deepseek_v3", {"tensor_parallel": 2}),
        "GDN TP2": ("qwen3_5", {"tensor_parallel": 2}),
        "DP2": ("qwen3", {}),
        "TP2 without sequence parallelism": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": False}),
        "experts TP2": ("experts", {"tensor_parallel": 2}),
    },
    "4": {
        "TP4 with two key-value heads": ("qwen3", {"tensor_parallel": 4}),
        "MoE TP2 EP2 PP2": (
            "qwen3_moe",
            {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1, "pipeline_parallel": 2},
        ),
        "MLA TP2 VPP2": ("deepseek_v3", {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    },
}
"""Launch, which begins with its number of ranks → case → kind of model, and options."""
MATRIX = ("1, the rest", "2, the rest", "4")
"""Launches for `make test-all`: they combine what the others have."""
Trained = Callable[[str], tuple[dict[str, Any], Path]]

pytestmark = pytest.mark.timeout(700)
"""The first test of each launch waits for it."""


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Launch → what its cases answer, and the folder of their adapters."""

    @once
    def run(name: str) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("lora")
        cases = {label: case(kind, options) for label, (kind, options) in CASES[name].items()}
        if name == "1":  # the other backend, before Megatron is imported
            cases = {
                label: {**case(kind, {}), "backend": "fsdp2"} for kind, label in EXPECTED.items() if "fsdp2" in label
            } | cases
            vision, lora = str(models["qwen2_5_vl"]), {"rank": 4, "alpha": 8}
            cases["vision"] = {"model": vision, "options": {}, "lora": lora, "steps": 1}
            cases["alone"] |= {"save_after": 2, "save": str(folder / "checkpoint")}
        if name == "2":
            alone = run("1")[1]
            cases["resumed"] = case("qwen3", {"tensor_parallel": 2}, resume=str(alone / "checkpoint"), steps=1)
            stored = {"adapter_path": str(alone / "alone"), "dropout": 0.5}
            whole = {"tensor_parallel": 2, "sequence_parallel": False}
            cases["trained further"] = case("qwen3", whole, lora=stored)
        return launch(int(name[0]), folder, train={"cases": cases})["train"], folder

    def case(kind: str, options: dict[str, Any], **others: Any) -> dict[str, Any]:
        return {
            "model": str(models[MODELS[kind]]),
            "options": options,
            "lora": LORA[kind],
            "steps": 3,
            "reference": True,
            **others,
        }

    return run


ON_RANKS = pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=[pytest.mark.matrix] * (group in MATRIX), id=f"{group[0]} ranks, {name}")
        for group, cases in CASES.items()
        for name in cases
    ],
)


@ON_RANKS
def test_trains_the_adapter_that_fsdp2_trains(group: str, name: str, trained: Trained) -> None:
    (answers, folder), (alone, others) = trained(group), trained("1")
    kind = CASES[group][name][0]
    answer, expected = answers[name], alone[EXPECTED[kind]]
    for part in ("logprobs", "entropies", "reference"):
        assert answer[part] == pytest.approx(expected[part], abs=2e-5), part
    assert answer["after"] == pytest.approx(expected["after"], abs=2e-4)
    for part in ("losses", "norms"):
        assert answer[part] == pytest.approx(expected[part], rel=2e-5), part
    assert answer["parameters"] == expected["parameters"]
    found, wanted = (load_file(at / "adapter_model.safetensors") for at in (folder / name, others / EXPECTED[kind]))
    assert found.keys() == wanted.keys()
    for tensor, values in wanted.items():
        torch.testing.assert_close(found[tensor], values, atol=1e-4, rtol=0, msg=tensor)
    assert answer["frozen"] and answer["reference"] == pytest.approx(answer["logprobs"], abs=2e-5)
    assert max(abs(a - b) for a, b in zip(answer["after"], answer["logprobs"], strict=True)) > 0.1


@ON_RANKS
def test_exports_merged_weights(group: str, name: str, trained: Trained) -> None:
    answers, folder = trained(group)
    assert answers[name]["changed"] == []  # before the first update
    merged, expected = (
        load_file(at)
        for at in (folder / f"{name}.safetensors", trained("1")[1] / f"{EXPECTED[CASES[group][name][0]]}.safetensors")
    )
    for tensor, values in expected.items():
        torch.testing.assert_close(merged[tensor], values, atol=2e-4, rtol=0, msg=tensor)


@ON_RANKS
def test_base_and_adapter_are_published_apart(group: str, name: str, trained: Trained) -> None:
    answers, folder = trained(group)
    assert answers[name]["parts"] == []  # each rank's boxes are those of the exported tensors
    published = load_file(folder / f"{name}.adapter")
    saved = load_file(folder / name / "adapter_model.safetensors")
    lora = LORA[CASES[group][name][0]]
    scale = lora["alpha"] / (lora["rank"] ** 0.5 if lora.get("rslora") else lora["rank"])
    assert published.keys() == saved.keys()
    for tensor, values in published.items():
        expected = saved[tensor] * (scale if "lora_B" in tensor else 1.0)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6, msg=tensor)


def test_a_checkpoint_goes_on_in_another_topology(trained: Trained) -> None:
    (alone, before), (answers, folder) = trained("1"), trained("2")
    for part in ("losses", "norms"):
        assert answers["resumed"][part] == pytest.approx(alone["alone"][part][2:], rel=2e-5), part
    assert answers["resumed"]["updates"] == 3
    found, wanted = (load_file(at / "adapter_model.safetensors") for at in (folder / "resumed", before / "alone"))
    for tensor, values in wanted.items():
        torch.testing.assert_close(found[tensor], values, atol=1e-4, rtol=0, msg=tensor)


def test_a_checkpoint_is_exported_with_its_adapter_merged(
    trained: Trained, models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = trained("1")[1] / "checkpoint"
    exported.write(checkpoint, tmp_path / "exported")
    merged, base = (load_file(at / "model.safetensors") for at in (tmp_path / "exported", models["qwen3"]))
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for layer in ("self_attn.k_proj", "mlp.up_proj"):
        a, b = (adapter[f"base_model.model.model.layers.1.{layer}.lora_{matrix}.weight"] for matrix in "AB")
        name = f"model.layers.1.{layer}.weight"
        torch.testing.assert_close(merged[name], base[name] + 8 / 4 * b @ a, atol=1e-6, rtol=1e-6, msg=name)


def test_an_adapter_is_trained_further_with_dropout(trained: Trained) -> None:
    """On both ranks the same inputs of an adapter that they share are dropped: their copies of its matrices stay
    alike."""
    answers = trained("2")[0]
    further, plain = answers["trained further"], answers["TP2"]
    assert further["logprobs"] == pytest.approx(trained("1")[0]["alone"]["after"], abs=2e-5)
    assert plain["losses"][0] == pytest.approx(_loss(plain), rel=1e-4)
    assert further["losses"][0] != pytest.approx(_loss(further), rel=1e-2)
    assert further["parts"] == [] and further["after"] != further["logprobs"]


def _loss(answer: dict[str, Any]) -> float:
    """The batch's loss by the scores before the first update."""
    return float(loss_of(torch.tensor(answer["logprobs"]), torch.tensor(answer["entropies"]), tuple(range(16))))


def test_what_is_refused(trained: Trained, models: dict[str, Path], tmp_path: Path) -> None:
    stored = str(trained("1")[1] / "alone")
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "model.lora.target_modules": ("qwen3", {"target_modules": ["q_prj"]}),
        "model.lora.dora": ("qwen3", {"dora": True, "merge": True}),
        "model.lora.adapter_path": ("qwen2", {"adapter_path": stored}),
        "model.lora.rank": ("qwen3", {"adapter_path": stored, "rank": 16}),
    }
    cases = {field: {"model": str(models[kind]), "lora": lora} for field, (kind, lora) in asked.items()}
    recurrent = {"model": str(models["qwen3_5"]), "lora": {"target_modules": ["q_proj", "in_proj_qkv"]}}
    told = launch(1, tmp_path, refused={"cases": {**cases, "recurrent": recurrent}})["refused"]
    assert "in_proj_qkv is in a GatedDeltaNet, which has no adapter" in told.pop("recurrent")
    assert told.keys() == asked.keys()
    assert all(what.startswith(f"{field}:") for field, what in told.items()), told


def test_its_folder_is_one_of_pefts(trained: Trained, models: dict[str, Path]) -> None:
    for group, name in (("2", "TP2"), ("1", "MLA"), ("2", "experts EP2")):
        answers, folder = trained(group)
        base = AutoModelForCausalLM.from_pretrained(models[MODELS[CASES[group][name][0]]], dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / name).eval()
        with torch.no_grad():
            logprobs = torch.cat([scores(model, row)[0] for row in range(16)]).tolist()
        assert logprobs == pytest.approx(answers[name]["after"], abs=5e-5), name


def test_the_folder_of_a_vision_model_has_the_names_of_its_module(trained: Trained, models: dict[str, Path]) -> None:
    """The model folder has others. The vision tower, which has layers of the same last names, gets no adapter."""
    answers, folder = trained("1")
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(models["qwen2_5_vl"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "vision").eval()
    assert not any("visual" in name for name, _ in model.named_parameters() if "lora" in name)
    with torch.no_grad():
        logprobs = torch.cat([scores(model, row)[0] for row in range(16)]).tolist()
    assert logprobs == pytest.approx(answers["vision"]["after"], abs=5e-5)
    assert logprobs != pytest.approx(answers["vision"]["logprobs"], abs=1e-2)
