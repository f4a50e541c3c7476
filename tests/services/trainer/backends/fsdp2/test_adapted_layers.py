"""Which layers have an adapter: every linear layer of each architecture, never a router, also where dense layers and
experts have the same names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import InvalidJob
from millrace.megatron.adapters import linear_layers
from millrace.megatron.architectures import ARCHITECTURES, read_shape
from millrace.megatron.weights import TRANSFORMER_ENGINE
from millrace.spec.lora import Lora
from services.trainer.backends.fsdp2.lora import inject, layers
from services.trainer.backends.lora import configuration
from services.trainer.protocol.microbatch import MicroBatch
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_computable import EXPERTS, HEADS, RIGHT, saved_config
from tests.services.trainer.backends.fsdp2.test_lora import LENGTHS, alone, backend_with, trained
from tests.services.trainer.checkpoints.saved import write_adapter

MIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_moe": {**HEADS, **EXPERTS, "num_experts": 4, "mlp_only_layers": [0], "num_hidden_layers": 4},
    "deepseek_v3": {**RIGHT["deepseek_v3"], "num_hidden_layers": 4},
    "glm4_moe": {**RIGHT["glm4_moe"], "first_k_dense_replace": 1, "num_hidden_layers": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
}
"""Models whose first layer is dense and whose other layers have experts."""
WITHOUT_NOISE = {"router_jitter_noise": 0.0}
DENSE = ("gate_proj", "up_proj", "down_proj")


def built(folder: Path) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def adapted(folder: Path, lora: Lora, config: LoraConfig | None = None) -> set[str]:
    model = built(folder)
    inject(model, config or configuration(lora), lora)
    return set(layers(model))


@pytest.mark.parametrize(("kind", "options"), [*RIGHT.items(), *MIXED.items()])
def test_every_linear_layer_but_head_and_routers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved_config(kind, options, tmp_path)
    model = built(folder)
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)} - {"lm_head"}
    expected = {name for name in linear if not name.endswith(("gate", "router"))}
    lora = Lora(rank=2)
    if not expected:
        with pytest.raises(InvalidJob, match=r"model\.lora\.target_modules"):
            adapted(folder, lora)
        return
    assert adapted(folder, lora) == expected
    if options is MIXED.get(kind):
        assert {f"model.layers.0.mlp.{name}" for name in DENSE} < expected
        assert not any(".experts." in name for name in expected)


@pytest.mark.parametrize("kind", sorted(RIGHT.keys() & ARCHITECTURES.keys()))
def test_the_layers_are_those_of_megatron(kind: str, tmp_path: Path) -> None:
    folder = saved_config(kind, {**MIXED.get(kind, RIGHT[kind]), **WITHOUT_NOISE}, tmp_path)
    assert adapted(folder, Lora(rank=2)) == set(linear_layers(read_shape(folder), TRANSFORMER_ENGINE))


def test_dense_layers_are_named_whole_where_experts_have_the_same_names(tmp_path: Path) -> None:
    """Whoever reads the PEFT folder would take a short name for the experts' layers, too."""
    folder = saved_config("qwen3_moe", MIXED["qwen3_moe"], tmp_path)
    lora = Lora(rank=2, target_modules=["linear_fc1"], exclude_modules=["up_proj"])
    config = configuration(lora)
    assert adapted(folder, lora, config) == {"model.layers.0.mlp.gate_proj"} == set(config.target_modules or ())
    lora = Lora(rank=2, target_modules=["linear_qkv"])
    adapted(folder, lora, config := configuration(lora))
    assert config.target_modules == ["k_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_model_of_dense_layers_and_experts_is_trained(kind: str, one_rank: torch.device, tmp_path: Path) -> None:
    """What is published merged computes the same in transformers, and the saved adapter goes on as it was."""
    folder = saved_config(kind, MIXED[kind], tmp_path / kind)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)
    drawn = samples(LENGTHS)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    backend = backend_with(folder, one_rank, {"rank": 4})
    trained(backend, drawn, updates=1)
    moved = dict(backend.adapter.export())
    assert all(moved[f"base_model.model.model.layers.0.mlp.{name}.lora_B.weight"].any() for name in DENSE)
    (expected_r,) = backend.logprobs([batch], temperature=1.0)

    published = saved_config(kind, MIXED[kind], tmp_path / "published")
    save_file({info.name: tensor for info, tensor in backend.export("float32")}, published / "model.safetensors")
    with torch.no_grad():
        found_r = alone(AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32), drawn)
    torch.testing.assert_close(found_r, expected_r, atol=2e-5, rtol=1e-5)
    write_adapter(tmp_path / "adapter", backend.adapter, folder)
    again = backend_with(folder, one_rank, {"adapter_path": str(tmp_path / "adapter")})
    torch.testing.assert_close(again.logprobs([batch], temperature=1.0)[0], expected_r, atol=1e-6, rtol=1e-6)
