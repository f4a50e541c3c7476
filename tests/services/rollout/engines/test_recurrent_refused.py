"""Engines in which layers of linear attention were not shown to be the trainer's refuse them before they start."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from millrace.errors import InvalidJob
from millrace.memory.shape import decoder_shape
from services.rollout.engines.options import is_recurrent, refuse_recurrent
from services.rollout.engines.transformers.model import random_model
from services.rollout.engines.vllm.options import engine_arguments
from tests.hybrid_models import IN_THREE, SIZES, TOKENS, TOWER
from tests.services.rollout.jobs import job_spec


@pytest.fixture
def wrapper(tmp_path: Path) -> Path:
    """A model whose config has the layers of its language model inside."""
    config = AutoConfig.for_model("qwen3_5", text_config={**SIZES, **IN_THREE}, vision_config=TOWER, **TOKENS)
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_language_model_inside_another_is_seen(wrapper: Path) -> None:
    assert is_recurrent(str(wrapper))
    with pytest.raises(InvalidJob, match=r"model\.path: .*linear attention were not shown to be the trainer's with an"):
        refuse_recurrent(str(wrapper), "an engine")


def test_a_release_without_the_language_model_builds_the_whole(wrapper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 has Qwen3.5 only with its tower, which gets no pictures then."""
    from vllm import ModelRegistry  # above, it would take each worker of pytest seconds

    spec = job_spec(wrapper)
    alone = engine_arguments(spec)
    assert alone.hf_overrides == {"architectures": ["Qwen3_5ForCausalLM"]} and not alone.limit_mm_per_prompt
    monkeypatch.setattr(ModelRegistry, "get_supported_archs", lambda: ["Qwen3_5ForConditionalGeneration"])
    arguments = engine_arguments(spec)
    assert not arguments.hf_overrides
    assert arguments.limit_mm_per_prompt == {"image": 0, "video": 0}


def test_a_config_without_kinds_of_layers_is_seen(tmp_path: Path) -> None:
    """The config of Qwen3-Next as it was published, with `full_attention_interval` instead."""
    sizes = {name: value for name, value in SIZES.items() if name != "layer_types"}
    stated = {"model_type": "qwen3_next", "full_attention_interval": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert is_recurrent(str(tmp_path))
    shape = decoder_shape(tmp_path)
    assert shape.recurrence is not None and shape.recurrence.layers == (True, False, True, False)


def test_the_transformers_engine_sees_it_too(wrapper: Path) -> None:
    with pytest.raises(InvalidJob, match="this engine cannot run layers of kind linear_attention"):
        random_model(job_spec(wrapper), "cpu", "sdpa")
