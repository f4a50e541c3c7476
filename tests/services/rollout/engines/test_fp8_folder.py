"""Engines with a model folder whose weights are FP8: their parameters are unquantized, as publications are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.weights.plans.manifest import Manifest, TensorInfo
from services.rollout.engines.sglang.options import config_overrides
from services.rollout.engines.transformers.model import StoredModel, random_model
from services.rollout.engines.vllm.options import check_model, engine_arguments
from tests.fp8 import save_quantized
from tests.models import save_tiny_model
from tests.services.rollout.jobs import job_spec


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    save_quantized(save_tiny_model(root / "model", tied=False), root / "fp8", root / "plain")
    return root / "fp8"


@pytest.mark.e2e
def test_vllm_holds_what_the_job_computes_in(fp8_model: Path) -> None:
    asked = {"hf_overrides": {"max_position_embeddings": 480}}
    config = engine_arguments(job_spec(fp8_model, "vllm", rollout={"engine_options": asked})).create_engine_config()
    check_model(config)
    assert config.quant_config is None and config.model_config.dtype is torch.float32
    assert config.model_config.hf_config.max_position_embeddings == 480


def test_sglang_is_told_the_same(fp8_model: Path) -> None:
    def told(asked: str | None) -> object:
        return json.loads(config_overrides(str(fp8_model), asked)["json_model_override_args"])

    assert told(None) == {"quantization_config": None}
    assert told('{"rope_theta": 5}') == {"rope_theta": 5, "quantization_config": None}
    assert config_overrides(str(fp8_model.parent / "plain"), None) == {}


def test_transformers_takes_unquantized_tensors(fp8_model: Path) -> None:
    spec, published = job_spec(fp8_model), load_file(fp8_model.parent / "plain" / "model.safetensors")
    model = StoredModel(random_model(spec, "cpu", "sdpa"), spec)
    model.check(Manifest(tuple(TensorInfo(name, tuple(t.shape), "float32") for name, t in published.items())))
    model.load(published.items())
    held = {name: tensor for name, tensor in model.parameters.items()}
    assert held.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in held.items())
