"""LoRA on Transformer Engine's layers, in bfloat16 on one GPU and on two: it trains as FSDP2 does with PEFT's layers.

Two updates with a large learning rate. Tolerances: log-probabilities 0.05 in the mean, losses and gradient norms 3 %,
the adapter 10 % of its length.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.launch import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(700),
]
LORA: dict[str, dict[str, Any]] = {
    "qwen3": {"rank": 16, "alpha": 16},
    "qwen3_moe": {"rank": 16, "alpha": 16, "target_modules": ["linear_qkv", "linear_proj"]},
    "experts": {"rank": 16, "alpha": 16, "target_modules": ["v_proj", "experts"]},
}
CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {"dense": ("qwen3", {}), "moe": ("qwen3_moe", {}), "experts": ("experts", {})},
    2: {
        "dense TP2": ("qwen3", {"tensor_parallel": 2}),
        "dense PP2": ("qwen3", {"pipeline_parallel": 2, "recompute": {"granularity": "full"}}),
        "dense CP2": ("qwen3", {"context_parallel": 2}),
        "moe EP2": ("qwen3_moe", {"expert_parallel": 2}),
        "experts EP2": ("experts", {"expert_parallel": 2}),
    },
}
EXPECTED = {"qwen3": "fsdp2 qwen3", "qwen3_moe": "fsdp2 qwen3_moe", "experts": "experts"}
"""The case of one rank that others are held against."""


@pytest.mark.parametrize("ranks", CASES)
def test_trains_the_adapter_that_fsdp2_trains(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    kinds = {"qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "experts": "qwen3_moe"}
    for kind in set(kinds.values()):
        tiny.save(kind, tmp_path / kind)

    def case(name: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked = {"model": str(tmp_path / kinds[name]), "options": options, "lora": LORA[name], "dtype": "bfloat16"}
        return {**asked, "export": "bfloat16", **more}

    cases = {expected: case(name, {}, backend="fsdp2") for name, expected in EXPECTED.items() if "fsdp2" in expected}
    cases |= {name: case(*chosen) for name, chosen in CASES[1].items()}
    answers = launch(1, tmp_path / "1", train={"cases": cases})["train"]
    if ranks > 1:
        more = {name: case(*chosen) for name, chosen in CASES[ranks].items()}
        answers |= launch(ranks, tmp_path / str(ranks), train={"cases": more})["train"]
    for name, (adapter, _) in CASES[ranks].items():
        answer, expected = answers[name], answers[EXPECTED[adapter]]
        apart = (torch.tensor(answer["after"]) - torch.tensor(expected["after"])).abs().mean()
        assert float(apart) < 0.05, name
        assert answer["losses"] == pytest.approx(expected["losses"], rel=0.03), name
        assert answer["norms"] == pytest.approx(expected["norms"], rel=0.03), name
        assert answer["frozen"] and answer["parts"] == [], name
        found = load_file(tmp_path / str(ranks) / name / "adapter_model.safetensors")
        wanted = load_file(tmp_path / "1" / EXPECTED[adapter] / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        distance = sum(float((found[tensor] - values).square().sum()) for tensor, values in wanted.items())
        length = sum(float(values.square().sum()) for tensor, values in wanted.items() if "lora_B" in tensor)
        assert distance < 0.01 * length, name
