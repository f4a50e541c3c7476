"""What of a PEFT folder is read, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.numpy import save_file
from torch import nn

from millrace.errors import InvalidJob
from millrace.lora import MODEL_UNCHANGED, read_adapter_folder
from millrace.spec.lora import Lora
from tests.lora.folders import LAYERS, Q, write_folder


def asked(folder: Path, **options: Any) -> Lora:
    return Lora(adapter_path=str(folder), **options)


def test_the_folder_says_rank_alpha_and_layers(tmp_path: Path) -> None:
    found = read_adapter_folder(asked(write_folder(tmp_path, use_rslora=True), dropout=0.5))
    assert found.layers == LAYERS
    options = found.options
    assert (options.rank, options.alpha, options.rslora, options.dropout) == (8, 16.0, True, 0.5)
    assert options.target_modules == ["down_proj", "q_proj"] and options.adapter_path == str(tmp_path)


def test_what_a_job_says_otherwise_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    read_adapter_folder(asked(folder, rank=8, alpha=16.0))
    read_adapter_folder(asked(folder, rank=32, alpha=32.0))  # what a spec without them holds after JSON
    for name, value in (("rank", 16), ("alpha", 8.0), ("dora", True), ("rslora", True)):
        with pytest.raises(InvalidJob, match=rf"model\.lora\.{name}: .*: the adapter in .* has .*leave it out"):
            read_adapter_folder(asked(folder, **{name: value}))


def test_an_adapter_of_dora_is_merged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, use_dora=True)
    assert read_adapter_folder(asked(folder, merge=True)).options.dora
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: engines cannot serve DoRA"):
        read_adapter_folder(asked(folder))


@pytest.mark.parametrize("init", [first for first in MODEL_UNCHANGED if first is not False])
def test_every_default_of_peft_is_read(init: Any, tmp_path: Path) -> None:
    """What the installed release writes, also after first values that leave the model as it is."""
    LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=init).save_pretrained(str(tmp_path))
    tree = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {each.name for each in dataclasses.fields(LoraConfig)} <= {*tree, "runtime_config"}
    assert read_adapter_folder(asked(write_folder(tmp_path, **tree))).options.rank == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_bias", True),
        ("bias", "all"),
        ("alora_invocation_tokens", [1, 2]),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("rank_pattern", {"q_proj": 4}),
        ("layer_replication", [[0, 1]]),
        ("fan_in_fan_out", True),
        ("something_of_a_later_release", {"strength": 1}),
    ],
)
def test_what_an_adapter_cannot_have_here_is_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=rf"model\.lora\.adapter_path: .*: its {key} is .*PEFT's default of {key}"):
        read_adapter_folder(asked(write_folder(tmp_path, **{key: value})))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"])
def test_an_adapter_of_a_changed_model_is_refused(init: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=f'its init_lora_weights is "{init}": PEFT changes the model') as refused:
        read_adapter_folder(asked(write_folder(tmp_path, init_lora_weights=init)))
    assert ("path_initial_model_for_weight_conversion" in refused.value.fix) == (init != "loftq")


@pytest.mark.parametrize(("init", "unchanged"), [*((init, True) for init in MODEL_UNCHANGED), ("pissa", False)])
def test_pefts_first_values_leave_the_model_as_it_is(init: Any, unchanged: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8))
    before = module[0].weight.detach().clone()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=init), module)
    base = module[0].base_layer
    assert isinstance(base, nn.Linear) and torch.equal(base.weight, before) == unchanged


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut_short(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def another_tensor(folder: Path) -> None:
    save_file({"base_model.model.lm_head.weight": np.ones(2)}, folder / "adapter_model.safetensors")


def without_b(folder: Path) -> None:
    save_file({f"base_model.model.{Q}.lora_A.weight": np.ones((8, 16))}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (without_config, "adapter_config.json cannot be read: No such file"),
        (pickled, "it has adapter_model.bin and no adapter_model.safetensors. Fix: save it as safetensors"),
        (cut_short, "adapter_model.safetensors cannot be read: it is cut short"),
        (another_tensor, "adapter_model.safetensors has base_model.model.lm_head.weight, which is no part of"),
        (without_b, f"adapter_model.safetensors has no base_model.model.{Q}.lora_B.weight"),
    ],
)
def test_a_folder_that_cannot_be_read(spoil: Any, told: str, tmp_path: Path) -> None:
    spoil(write_folder(tmp_path))
    with pytest.raises(InvalidJob) as refused:
        read_adapter_folder(asked(tmp_path))
    assert str(refused.value).startswith("model.lora.adapter_path:") and told in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, 'its peft_type is "IA3"'),
        ({"r": None}, "its r is null"),
        ({"r": 100_000}, "its r is 100000"),
        ({"lora_alpha": -1}, "its lora_alpha is -1"),
        ({"r": 4}, "has shape (8, 16), and the rank is 4"),
    ],
)
def test_values_that_no_adapter_has(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob) as refused:
        read_adapter_folder(asked(write_folder(tmp_path, **changes)))
    assert told in str(refused.value)


def test_there_is_no_hub(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="there is no such folder"):
        read_adapter_folder(asked(tmp_path / "owner" / "name"))
