"""vLLM's tables of architectures are what is measured: of those that the fsdp2 backend trains, which its CPU build
computes as transformers does, and which otherwise."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engines.vllm import EQUAL_ON_CPU, SHIFTED_WINDOWS, UNEQUAL, UNEQUAL_ON_CPU
from millrace.errors import InvalidJob
from millrace.fsdp2.architectures import GATED_DELTA, REFUSED, RIGHT, RIGHT_WITH
from services.rollout.engines.vllm.options import TEXT_PARTS, engine_arguments
from tests.services.rollout.engines import vllm_sweep
from tests.services.rollout.jobs import job_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tables are of the CPU build"),
]
TRAINED = sorted({*RIGHT, *RIGHT_WITH} - set(TEXT_PARTS))
OTHERWISE = {*SHIFTED_WINDOWS, *UNEQUAL, *UNEQUAL_ON_CPU}
TOLERANCE = 1e-4


def check(model_type: str, folder: Path) -> None:
    found = vllm_sweep.look(model_type, folder / model_type)
    if model_type in EQUAL_ON_CPU:
        assert not found.failure and not found.differing
        assert found.nats is not None and found.nats < TOLERANCE
    elif model_type in OTHERWISE:
        assert found.nats is not None and found.nats > 100 * TOLERANCE, found.failure
    else:
        assert found.failure, f"vLLM runs it, {found.nats:.2g} nats from transformers"


def test_each_architecture_is_in_one_table() -> None:
    assert not EQUAL_ON_CPU & OTHERWISE and not (EQUAL_ON_CPU | OTHERWISE) & REFUSED.keys()
    assert set(TRAINED) >= GATED_DELTA | OTHERWISE


@pytest.mark.matrix  # tests/services/trainer/backends/megatron/test_vllm.py has two, test_what_is_not_… the refusals
@pytest.mark.parametrize("model_type", TRAINED)
def test_the_tables_are_what_is_measured(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


SHORT = "original_max_position_embeddings"
YARN: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"mscale": 0.7, "mscale_all_dim": 0.7}, ""),
    ({"mscale": 1.0, "mscale_all_dim": 0}, ""),
    ({"mscale": 0.7}, "do not both follow mscale = 0.7"),
    ({"mscale_all_dim": 1.0}, "do not both follow mscale_all_dim = 1.0"),
    ({"attention_factor": 1.0}, "do not both follow attention_factor = 1.0"),
    ({"truncate": False}, "do not both follow truncate = False"),
    ({"type": "linear"}, "for yarn, and its config has the type linear"),
]
STRETCHED = {SHORT: 512, "max_position_embeddings": 512 * 512}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
SCALED = {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "cohere2", "sliding_window": 399}, "one token more than transformers', 400"),
        ({"model_type": "cohere2", "sliding_window": 400}, ""),
        ({"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 8}, "experts by groups"),
        (
            {"model_type": "deepseek_v2", "norm_topk_prob": True},
            "norm_topk_prob = True, and transformers .* with False",
        ),
        ({"model_type": "deepseek_v3"}, "takes scoring_func = 'softmax', and transformers .* with 'sigmoid'"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "does not follow rope_interleave = False"),
        (
            {"model_type": "deepseek_v2", "rms_norm_eps": 1e-4},
            "norms latents with its rms_norm_eps of 0.0001, and transformers with 1e-06",
        ),
        *(
            ({"model_type": "deepseek_v2", "rope_scaling": {"type": "yarn", **of_latents}}, reason)
            for of_latents, reason in YARN
        ),
        ({"model_type": "phi3", **STRETCHED, "rope_scaling": LONGROPE}, ""),
        (
            {"model_type": "phi3", **STRETCHED, "rope_scaling": {**LONGROPE, "attention_factor": 1.0}},
            "longrope. with a factor of 1.41421, and transformers of 1",
        ),
        ({"model_type": "phi3", **STRETCHED, "rope_scaling": {**LONGROPE, "short_mscale": 1.0}}, "with a factor of 1"),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "does not follow norm_topk_prob = True"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "does not follow clip_qkv = 8.0"),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "does not follow hidden_act = 'gelu'"),
        ({"model_type": "llama", "sliding_window": 399}, "with its sliding_window of 399 tokens"),
        ({"model_type": "llama", "sliding_window": 400}, ""),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 99}, "with full attention"),
        ({"model_type": "qwen2_moe", "use_sliding_window": False, "sliding_window": 99}, ""),
        (
            {"model_type": "ministral3", "rope_parameters": {**SCALED, SHORT: 399}},
            "from token 399 on .* llama_4_scaling",
        ),
        ({"model_type": "ministral3", "rope_parameters": {**SCALED, SHORT: 400}}, ""),
        ({"model_type": "ernie4_5_moe"}, "without their e_score_correction_bias"),
        ({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}, "nats from transformers"),
    ],
)
def test_what_is_not_equal_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = job_spec(tmp_path, "vllm")  # texts of up to 400 tokens
    if not reason:
        engine_arguments(spec)
        return
    with pytest.raises(InvalidJob, match=f"model.path.*{reason}.*the transformers engine"):
        engine_arguments(spec)
