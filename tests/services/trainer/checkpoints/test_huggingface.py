"""Tensors that an export copies from the model folder."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from services.trainer.checkpoints.huggingface import copy_rest, dtype_of, names_in, save_tensors, state_dtype, untrained

TRAINED = {"model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"}
VISION = {"visual.blocks.5.weight", "vision_model.layers.5.weight"}
DROPPED = {"model.layers.2.mlp.weight", "model.layers.2.shared_head.head.weight", "mtp.layers.0.weight"}
"""Tensors of heads that predict several tokens at once."""


@pytest.fixture(params=["one file", "two files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of two layers."""
    names = sorted(TRAINED | VISION | DROPPED | {"lm_head.weight"})
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 2}}))
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    if request.param == "one file":
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path
    weight_map = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_written_file_has_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640


@pytest.mark.parametrize("head", ["lm_head.weight", "score.weight", None])
def test_what_is_not_trained_is_taken_over(folder: Path, head: str | None) -> None:
    """The head is that of a policy, of a critic, or none: that of a policy is tied."""
    found = dict(untrained(folder, TRAINED | ({head} if head else set())))
    assert found.keys() == VISION
    names = sorted(TRAINED | VISION | DROPPED | {"lm_head.weight"})
    assert all(tensor.tolist() == [names.index(name)] * 2 for name, tensor in found.items())


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": None}, "bfloat16"),
        ({"quantization_config": {"quant_method": "fp8"}, "text_config": {"dtype": "float16"}}, "bfloat16"),
    ],
)
def test_a_dtype_that_the_config_does_not_name_is_that_of_the_weights(
    config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(tmp_path) == (dtype if dtype == "float16" or "quantization_config" in config else "float32")
    save_file({"a": torch.ones(8, 8).bfloat16(), "bias": torch.ones(8)}, tmp_path / "model.safetensors")
    assert dtype_of(tmp_path) == dtype


def test_the_config_says_the_dtype_that_is_written(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config, written in (
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
        (
            {"text_config": {"dtype": "float32", "n": 1}},
            {"text_config": {"dtype": "float16", "n": 1}, "dtype": "float16"},
        ),
    ):
        file.write_text(json.dumps(config))
        state_dtype(tmp_path, "float16")
        assert json.loads(file.read_text()) == written


def test_every_chat_template_is_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (copy := tmp_path / "copy").mkdir()
    copy_rest(folder, copy)
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"


def test_what_the_folder_names_otherwise_is_not_there_twice(folder: Path) -> None:
    assert list(untrained(folder, {f"decoder.{name}" for name in TRAINED})) == []


def test_a_folder_without_safetensors_has_nothing_to_take_over(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    assert list(untrained(folder, TRAINED)) == []


def test_what_is_not_trained_may_be_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """The job's model.weights: the folder has only the config."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    stored = {name: torch.full((2,), float(number)) for number, name in enumerate(sorted(TRAINED | VISION | DROPPED))}
    dcp.save({"model": stored}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = dict(untrained(tmp_path, TRAINED, tmp_path / "dcp"))
    assert found.keys() == VISION
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    assert list(untrained(tmp_path, TRAINED)) == []


def test_a_language_model_inside_another_keeps_the_folders_names(tmp_path: Path) -> None:
    names = ["model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight", "model.plain.weight"]
    names += ["visual.older.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    stored_name = names_in(tmp_path)
    asked = [
        "model.norm.weight",
        "lm_head.weight",
        "model.plain.weight",
        "model.new.weight",
        "model.visual.norm.weight",
        "model.language_model.plain.weight",
        "model.visual.older.weight",
    ]
    found = [stored_name(name) for name in asked]
    assert found == ["model.language_model.norm.weight", *asked[1:-2], "model.plain.weight", "visual.older.weight"]
    given = {stored_name(name) for name in asked[:3]}
    assert dict(untrained(tmp_path, given)).keys() == {"model.visual.norm.weight", "visual.older.weight"}
