"""Jobs that train the adapter of a PEFT folder further, and names of layers that mean nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from millrace.errors import InvalidJob
from services.trainer.backends.fsdp2 import model_check
from services.trainer.protocol.microbatch import MicroBatch
from tests.adapters import with_adapter
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import LENGTHS, alone, backend_with
from tests.services.trainer.groups import job_spec


def test_an_adapter_of_peft_with_its_own_rank(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    """The spec comes as JSON, in which every option has a value."""
    base = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    adapted = with_adapter(base, seed=1, rank=6, alpha=3, targets=["k_proj", "down_proj"])
    adapted.save_pretrained(tmp_path)
    drawn = samples(LENGTHS)
    backend = backend_with(tied_model, one_rank, {"adapter_path": str(tmp_path)})
    (logprobs_r,) = backend.logprobs([MicroBatch.pack(drawn, range(len(drawn)))], temperature=1.0)
    with torch.no_grad():
        torch.testing.assert_close(logprobs_r, alone(adapted, drawn), atol=2e-5, rtol=1e-5)
    assert (backend.adapter.settings.rank, backend.adapter.settings.alpha) == (6, 3.0)


def test_the_folder_that_is_saved_says_how_it_is_read(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=r".*layers\.1\.self_attn\.(q|v)_proj", init_lora_weights="orthogonal")
    get_peft_model(base, config).save_pretrained(tmp_path)
    described = backend_with(tied_model, one_rank, {"adapter_path": str(tmp_path)}).adapter.config
    assert described.init_lora_weights is True and described.layers_to_transform is None
    assert described.target_modules == [f"model.layers.1.self_attn.{part}_proj" for part in "qv"]


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"target_modules": ["q_proj", "v_prj"]}, ["model.lora.target_modules"]),
    ({"target_modules": ["q_proj", "lm_head"]}, ["model.lora.target_modules"]),
    ({"exclude_modules": ["self_attn", "k_prj"]}, ["model.lora.exclude_modules"] * 2),
    ({"adapter_path": "/nowhere"}, ["model.lora.adapter_path"]),
]


@pytest.mark.parametrize(("lora", "fields"), REFUSED, ids=str)
def test_names_are_refused_before_and_when_the_trainer_loads(
    one_rank: torch.device, tied_model: Path, lora: dict[str, Any], fields: list[str]
) -> None:
    with pytest.raises(InvalidJob) as told:
        model_check.check(job_spec(tied_model, model={"lora": lora}))
    with pytest.raises(InvalidJob) as refused:
        backend_with(tied_model, one_rank, lora)
    assert [mistake.field for mistake in told.value.mistakes] == fields
    assert str(told.value) == str(refused.value)


def test_a_folder_of_another_model_is_refused_by_its_own_field(tied_model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    with_adapter(base, seed=1, rank=2, alpha=2, targets=["q_proj"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    header = file.read_bytes()
    file.write_bytes(header.replace(b"self_attn.q_proj", b"self_attn.c_attn"))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_modules": ["c_attn"]})
    )
    with pytest.raises(InvalidJob, match=r"model\.lora\.adapter_path: .*c_attn is no linear layer.* give an adapter"):
        model_check.check(job_spec(tied_model, model={"lora": {"adapter_path": str(tmp_path)}}))
