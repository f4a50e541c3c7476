"""What is written is read again bit for bit, and nothing incomplete is left behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from millrace.checkpoints.index import read_index
from millrace.checkpoints.source import check_checkpoint
from millrace.errors import InvalidState
from millrace.megatron.architectures import read_shape
from services.trainer.checkpoints.foreign import writing
from services.trainer.checkpoints.foreign.module_names import empty_module, module_form
from services.trainer.checkpoints.foreign.writing import CheckpointWriter, megatron_form, module_states
from services.trainer.checkpoints.model_files import ModelFiles
from tests.services.trainer.backends.megatron import tiny

KINDS = ("qwen2", "qwen3_moe", "mixtral", "deepseek_v3")


def test_both_forms_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FILE_BYTES", 100_000)  # several files
    for kind in KINDS:
        model = tiny.save(kind, tmp_path / kind)
        stored = load_file(tmp_path / kind / "model.safetensors")
        module = empty_module(tmp_path / kind)
        assert module is not None
        names = module_form(module)
        assert names is not None
        for megatron, form in ((True, megatron_form(read_shape(tmp_path / kind))), (False, names)):
            folder = tmp_path / f"{kind} {megatron}"
            folder.mkdir()
            shutil.copyfile(tmp_path / kind / "config.json", folder / "config.json")
            writer = CheckpointWriter(folder, form, megatron=megatron)
            for name, tensor in stored.items():
                writer.add(name, tensor)
            writer.finish()
            assert len(list(folder.glob("*.distcp"))) > 1
            check_checkpoint(folder, None, "model.path")
            with ModelFiles(folder) as files:
                assert all(torch.equal(files.whole(name), tensor) for name, tensor in stored.items()), (kind, megatron)
        state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        dcp.load(state, checkpoint_id=tmp_path / f"{kind} False", no_dist=True)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()), kind


def test_layers_that_are_alike_are_stacked(tmp_path: Path) -> None:
    for kind, key in (("mixtral", "decoder.layers.mlp.experts.experts"), ("qwen3_moe", "decoder.layers.0.mlp.experts")):
        tiny.save(kind, tmp_path / kind)
        form = megatron_form(read_shape(tmp_path / kind))
        assert any(target.part.key.startswith(key) for targets in form.values() for target in targets), kind


def test_states_of_modules_are_there_for_each_layer_and_expert(tmp_path: Path) -> None:
    found = {}
    for kind in ("mixtral", "deepseek_v3"):
        tiny.save(kind, tmp_path / kind)
        found[kind] = set(module_states(megatron_form(read_shape(tmp_path / kind))))
    assert {
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.1_4.4",
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_2_4",
        "decoder.layers.self_attention.core_attention._extra_state/shard_2_4",
    } <= found["mixtral"]
    assert {
        "decoder.layers.1.mlp.experts.experts.linear_fc2._extra_state/shard_7_8",
        "decoder.layers.0.self_attention.linear_kv_up_proj._extra_state/shard_0_1",
    } <= found["deepseek_v3"]


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path) -> None:
    tiny.save("qwen2", tmp_path / "model")
    writer = CheckpointWriter(tmp_path / "out", megatron_form(read_shape(tmp_path / "model")), megatron=True)
    with pytest.raises(InvalidState, match=r"visual\.blocks has no place"):
        writer.add("visual.blocks", torch.zeros(3))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name in sorted(stored)[1:]:
        writer.add(name, stored[name])
    with pytest.raises(InvalidState, match=f"has no tensor {min(stored)}, and lacks 1 in all"):
        writer.finish()
    assert not (tmp_path / "out" / ".metadata").exists()


def test_what_is_written_holds_no_more_than_the_boxes(tmp_path: Path) -> None:
    """torch.save writes the whole storage of a view."""
    tiny.save("mixtral", tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    writer = CheckpointWriter(tmp_path / "out", megatron_form(read_shape(tmp_path / "model")), megatron=True)
    for name, tensor in stored.items():
        writer.add(name, tensor)
    writer.finish()
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    chunks = {
        (chunk.file, chunk.start): chunk.length
        for tensor in read_index(tmp_path / "out", "model.weights").tensors.values()
        for chunk in tensor.chunks
    }
    numbers = sum(tensor.numel() * 4 for tensor in stored.values())
    assert sum(chunks.values()) < numbers + 2000 * len(chunks)
