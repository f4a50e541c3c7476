"""Which values of a valid job are told with a better one."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.admission.advice import advice
from millrace.spec import parse
from tests.megatron import configs

RANK, RATE = "model.lora.rank", "trainer.optimizer.lr"


def told(lora: dict[str, Any] | None, rate: float) -> list[str]:
    job = {
        "name": "adapters",
        "output": "/data/out",
        "model": {"path": "/data/model", "lora": lora},
        "data": {"files": ["/data/train.parquet"]},
        "trainer": {"optimizer": {"lr": rate}},
    }
    return [str(each) for each in advice(parse(job))]


@pytest.mark.parametrize(
    ("lora", "rate", "fields"),
    [
        (None, 1e-6, []),
        ({"rank": 32}, 1e-5, []),
        ({"rank": 31}, 1e-5, [RANK]),
        ({}, 1e-6, [RATE]),
        ({}, 5e-6, []),
        ({}, 0.0, []),
        ({"rank": 8}, 1e-6, [RANK, RATE]),
        ({"adapter_path": "/data/adapter"}, 1e-6, [RATE]),
        ({"adapter_path": "/data/adapter", "rank": 8}, 1e-5, []),
    ],
)
def test_a_small_rank_and_a_learning_rate_for_all_weights(
    lora: dict[str, Any] | None, rate: float, fields: list[str]
) -> None:
    assert [text.partition(":")[0] for text in told(lora, rate)] == fields


def test_the_value_and_the_better_one_are_named() -> None:
    assert told({"rank": 8}, 1e-6) == [
        "model.lora.rank: 8: adapters of a rank under 32 learn more slowly. Fix: give 32 or more.",
        "trainer.optimizer.lr: 1e-06: this is a learning rate for all weights, and adapters learn slowly with it."
        " Fix: give about ten times the rate for all weights, such as 1.0e-5.",
    ]


LATENT = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_q_proj"]
FUSED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


@pytest.mark.parametrize(
    ("config", "backend", "names", "without"),
    [
        (configs.QWEN3_30B_A3B, "megatron", FUSED, []),
        (configs.MIXTRAL, "megatron", FUSED, []),
        (configs.QWEN3_30B_A3B, "fsdp2", FUSED, ["linear_fc1", "linear_fc2"]),
        (configs.DEEPSEEK_V3, "megatron", [*LATENT, *FUSED[1:]], ["linear_q_proj"]),
        (configs.MOONLIGHT, "megatron", [*LATENT, *FUSED[1:]], ["linear_q_down_proj", "linear_q_up_proj"]),
        (configs.DEEPSEEK_V3, "megatron", FUSED, ["linear_qkv"]),
    ],
)
def test_megatrons_names_that_have_no_effect_are_told(
    config: dict[str, Any], backend: str, names: list[str], without: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {
        "name": "adapters",
        "output": "/data/out",
        "model": {"path": str(tmp_path), "lora": {"target_modules": names, "merge": True}},
        "data": {"files": ["/data/train.parquet"]},
        "trainer": {"backend": backend, "optimizer": {"lr": 1e-5}},
    }
    assert [json.loads(each.value) for each in advice(parse(job))] == without


def told_of(config: dict[str, Any], images: bool, folder: Path) -> list[str]:
    """What is told of a job with a model of this config, whose prompts have images or not."""
    (folder / "config.json").write_text(json.dumps(config))
    job = {
        "name": "engines",
        "output": "/data/out",
        "model": {"path": str(folder)},
        "data": {"files": ["/data/train.parquet"], "images": {} if images else None},
    }
    return [str(each) for each in advice(parse(job))]


IN_TURNS = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "qwen3"}, ""),
        ({"model_type": "cohere2", "sliding_window": 512}, "replicas with vLLM refuse it: vLLM's windows of cohere2"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "replicas with vLLM refuse it: vLLM computes"),
        ({"model_type": "ernie4_5_moe"}, "replicas with vLLM refuse it: vLLM's CPU build"),
        ({"text_config": {"model_type": "qwen3_5_moe_text", "norm_topk_prob": True}}, ""),
        (
            {"text_config": {"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}},
            "as transformers does, only with norm_topk_prob: true",
        ),
        ({"text_config": {"model_type": "qwen3_vl_text", "rope_parameters": IN_TURNS}}, ""),
        ({"text_config": {"model_type": "qwen3_vl_text", "rope_scaling": IN_TURNS}}, ""),
        (
            {"text_config": {"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [24, 20, 20]}}},
            "replicas with vLLM refuse it: vLLM takes the axes of its positions in turns only with mrope_section and",
        ),
        (
            {"text_config": {"model_type": "qwen3_vl_text", "rope_parameters": {**IN_TURNS, "rope_type": "yarn"}}},
            "replicas with vLLM refuse it: rotary positions of the type yarn by several axes were not compared",
        ),
    ],
)
def test_a_model_that_vllm_computes_otherwise_is_told(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = told_of(config, False, tmp_path)
    assert len(found) == bool(told) and all(told in each and "transformers engine" in each for each in found)


def test_a_model_that_sglang_computes_otherwise_is_told(tmp_path: Path) -> None:
    (found,) = told_of({"model_type": "mistral", "sliding_window": 512}, False, tmp_path)
    assert "replicas with SGLang refuse it: SGLang computes it with full attention" in found


@pytest.mark.parametrize(("images", "rope", "told"), [(False, {}, 0), (True, {}, 1), (True, IN_TURNS, 0)])
def test_axes_of_qwen3_5_count_with_images(images: bool, rope: dict[str, Any], told: int, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "rope_parameters": rope}}
    found = told_of(config, images, tmp_path)
    assert len(found) == told and all("only with mrope_section" in each for each in found)


@pytest.mark.parametrize(("images", "theta", "told"), [(True, 10000.0, 0), (True, 5000.0, 1), (False, 5000.0, 0)])
def test_positions_of_patches_that_vllm_does_not_take_are_told(
    images: bool, theta: float, told: int, tmp_path: Path
) -> None:
    vision = {"rope_parameters": {"rope_type": "axial", "rope_theta": theta}}
    found = told_of({"model_type": "qwen2_5_vl", "vision_config": vision}, images, tmp_path)
    assert len(found) == told and all("rope_theta" in each for each in found)
    assert not any("transformers engine" in each for each in found), "which takes no images"
