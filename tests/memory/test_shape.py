"""Reading the sizes of any decoder."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.shapes import config_of
from millrace.errors import InvalidJob
from millrace.megatron.architectures.published import PUBLISHED, shape_of
from millrace.megatron.architectures.shape import ExpertShape
from millrace.memory.adapters import adapter_parameters
from millrace.memory.layers import parameters
from millrace.memory.shape import decoder_shape
from millrace.spec.lora import Lora
from tests.lora.folders import write_folder

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}


def folder(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_an_architecture_that_only_transformers_knows(tmp_path: Path) -> None:
    assert parameters(decoder_shape(folder(tmp_path, LLAMA))) == pytest.approx(8.03e9, rel=0.001)
    nested = {"model_type": "gemma3", "text_config": LLAMA}
    assert parameters(decoder_shape(folder(tmp_path, nested))) == pytest.approx(8.03e9, rel=0.001)


def test_a_published_model_with_recurrent_layers_has_its_parameters(tmp_path: Path) -> None:
    """Qwen3-Next-80B-A3B, whose config states how often a layer attends."""
    shape = decoder_shape(folder(tmp_path, QWEN3_NEXT))
    assert parameters(shape) == pytest.approx(80e9, rel=0.01) and shape.attending == 12


def test_the_tower_of_qwen2_5_vl_7b_has_its_parameters(tmp_path: Path) -> None:
    """transformers counts, on the meta device. Its config leaves out what it has by default."""
    config = {**LLAMA, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}}
    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(hidden_size=1280))
    counted = sum(each.numel() for each in tower.parameters())
    assert counted > 6e8
    shape = decoder_shape(folder(tmp_path, config)).tower
    assert shape is not None and shape.parameters == counted
    assert decoder_shape(folder(tmp_path, LLAMA)).tower is None


def test_the_tower_of_qwen3_vl_8b_has_its_parameters(tmp_path: Path) -> None:
    """Its config names no sizes but those that differ from transformers' own."""
    config = {**LLAMA, "model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 4096}}
    with torch.device("meta"):
        tower = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(out_hidden_size=4096))
    shape = decoder_shape(folder(tmp_path, config))
    assert shape.tower is not None
    assert shape.tower.parameters == sum(parameter.numel() for parameter in tower.parameters())


EXPERTS = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128}
QWEN3_VL_30B_A3B = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **LLAMA,
        **EXPERTS,
        "model_type": "qwen3_vl_moe_text",
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "vision_config": {"out_hidden_size": 2048},
}
QWEN3_5_35B_A3B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{name: value for name, value in QWEN3_NEXT.items() if name != "intermediate_size"},
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "vision_config": {"out_hidden_size": 2048},
}


@pytest.mark.parametrize(("config", "millions"), [(QWEN3_VL_30B_A3B, 31070.8), (QWEN3_5_35B_A3B, 35107.2)])
def test_published_models_with_towers_and_experts_have_their_parameters(
    config: dict[str, object], millions: float, tmp_path: Path
) -> None:
    """As transformers counts those of its own modules of these sizes."""
    counted = parameters(decoder_shape(folder(tmp_path, config)), with_tower=True)
    assert counted / 1e6 == pytest.approx(millions, rel=1e-5)


def test_an_architecture_that_the_megatron_backend_builds_is_read_whole(tmp_path: Path) -> None:
    shape = decoder_shape(folder(tmp_path, config_of(shape_of("qwen3-30b-a3b"))))
    assert shape.experts is not None and parameters(shape) == pytest.approx(30.5e9, rel=0.005)


def test_a_model_that_the_megatron_backend_refuses_is_predicted_for_the_other_backend(tmp_path: Path) -> None:
    config = {**config_of(shape_of("qwen3-30b-a3b")), "num_experts_per_tok": 1}
    assert decoder_shape(folder(tmp_path, config)).experts == ExpertShape(128, 1, 768, (True,) * 48)


@pytest.mark.parametrize(
    ("name", "millions"), [("qwen3-vl-2b", 2127.5), ("qwen3-vl-4b", 4437.8), ("qwen3-vl-8b", 8767.1)]
)
def test_published_models_with_towers_have_their_parameters(name: str, millions: float) -> None:
    shape = PUBLISHED[name]
    assert shape.tower is not None
    assert (parameters(shape) + shape.tower.parameters) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("config", [{"model_type": "other"}, [1]])
def test_a_config_without_sizes_is_refused(config: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"config\.json"):
        decoder_shape(folder(tmp_path, config))


def test_adapters_of_rank_32_have_the_parameters_that_were_measured() -> None:
    assert adapter_parameters(shape_of("qwen3-8b"), Lora(rank=32)) == pytest.approx(87e6, rel=0.01)
    part = Lora(rank=32, target_modules=["q_proj", "v_proj"])
    assert adapter_parameters(shape_of("qwen3-8b"), part) == 36 * 32 * (4096 + 4096 + 4096 + 1024)


def test_an_adapter_that_is_trained_further_has_the_rank_and_the_layers_of_its_folder(tmp_path: Path) -> None:
    layers = {"model.layers.0.self_attn.q_proj": (4096, 4096), "model.layers.1.self_attn.q_proj": (4096, 4096)}
    lora = Lora(adapter_path=str(write_folder(tmp_path, layers, rank=8)))
    assert adapter_parameters(shape_of("qwen3-8b"), lora) == 2 * 8 * (4096 + 4096)
    assert adapter_parameters(shape_of("qwen3-8b"), Lora(adapter_path="/elsewhere")) == pytest.approx(87e6, rel=0.01)
