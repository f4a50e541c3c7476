"""What is wrong with a distributed checkpoint is told at submission: which tensor, which file. Nothing in it runs."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from millrace.backends.megatron import MegatronOptions
from millrace.checkpoints.index import read_index
from millrace.checkpoints.source import check_checkpoint, located
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, layout, tensors

CONFIG = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}

ONE = Topology(1, MegatronOptions())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def in_hugging_face_names(folder: Path) -> dict[str, torch.Tensor]:
    return {each.name: torch.zeros(each.shape) for each in tensors(read_shape(folder), ONE, LOCAL)}


def in_megatron_names(folder: Path) -> dict[str, torch.Tensor]:
    (parameters,) = layout(read_shape(folder), ONE, 0, LOCAL)
    return {name: torch.zeros(placement.shape) for name, placement in parameters.items()}


def saved(checkpoint: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    return checkpoint


def saved_by_megatron(checkpoint: Path, state: dict[str, Any], backend: str = "torch_dist") -> Path:
    saved(checkpoint, state)
    (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return checkpoint


@pytest.mark.parametrize("wrapped", [lambda state: state, lambda state: {"model": state}, lambda s: {"module": s}])
def test_every_tensor_is_found_under_the_usual_wrappers(
    wrapped: Callable[[dict[str, Any]], dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    state = {name.replace("layers.0.", "layers.0._orig_mod."): t for name, t in in_hugging_face_names(folder).items()}
    others = {"optimizer": {"model.norm.weight": torch.zeros(3)}, "step": 4}
    checkpoint = saved(tmp_path / "dcp", wrapped(state) | others)
    check_checkpoint(folder, checkpoint)
    found = located(read_index(checkpoint, "model.weights"), folder)
    expected = {each.name: each.shape for each in tensors(read_shape(folder), ONE, LOCAL)}
    assert {name: tensor.shape for name, tensor in found.items() if name in expected} == expected


def test_a_checkpoint_in_the_model_folder_needs_no_field(folder: Path) -> None:
    saved(folder, in_hugging_face_names(folder) | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(InvalidJob, match=r'model\.path: ".*": model\.norm\.weight is \(3,\), .* asks for \(16,\)'):
        check_checkpoint(folder, None, "model.path")


def test_padding_may_be_any(folder: Path, tmp_path: Path) -> None:
    state = in_megatron_names(folder)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.zeros(128, 16)
    check_checkpoint(folder, saved_by_megatron(tmp_path / "dist", state))


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
LACKS: list[tuple[str, Any, str]] = [
    (QKV, None, r"has no tensor for model\.layers\.1\.self_attn\.q_proj\.weight"),
    (QKV, torch.zeros(60, 16), r"linear_qkv\.weight is \(60, 16\), the config asks for \(64, 16\)"),
    ("embedding.word_embeddings.weight", None, r"has no tensor embedding\.word_embeddings\.weight"),
    ("embedding.word_embeddings.weight", torch.zeros(49, 16), r"is \(49, 16\), the config asks for \(50, 16\)"),
]


def test_a_tensor_of_a_dist_checkpoint_that_the_model_does_not_take_is_refused_by_key(
    folder: Path, tmp_path: Path
) -> None:
    state, bias = in_megatron_names(folder), "decoder.layers.0.self_attention.linear_proj.bias"
    ignored = {"decoder.layers.0.mlp._extra_state": torch.zeros(1), "optimizer.decoder.x": torch.zeros(1)}
    check_checkpoint(folder, saved_by_megatron(tmp_path / "whole", state | ignored))
    checkpoint = saved_by_megatron(tmp_path / "dist", state | {bias: torch.ones(16)})
    with pytest.raises(InvalidJob, match=rf"model\.weights: .*stores {bias}, for which the model of the config has no"):
        check_checkpoint(folder, checkpoint)


@pytest.mark.parametrize(("name", "value", "reason"), LACKS)
def test_a_dist_checkpoint_that_does_not_fit_is_refused_by_tensor(
    name: str, value: torch.Tensor | None, reason: str, folder: Path, tmp_path: Path
) -> None:
    state = {key: t for key, t in in_megatron_names(folder).items() if key != name}
    checkpoint = saved_by_megatron(tmp_path / "dist", state | ({} if value is None else {name: value}))
    with pytest.raises(InvalidJob, match=rf'model\.weights: "{checkpoint}": .*{reason}') as refused:
        check_checkpoint(folder, checkpoint)
    assert refused.value.fix


def truncate(checkpoint: Path) -> None:
    data = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(data[:-100])


def nested(checkpoint: Path) -> None:
    (checkpoint / "iter_0000007").mkdir()
    (checkpoint / ".metadata").rename(checkpoint / "iter_0000007" / ".metadata")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("7")


BREAKS: list[tuple[Callable[[Path], object], str]] = [
    (lambda c: (c / "__0_0.distcp").unlink(), r"1 of its 1 files are missing: __0_0\.distcp"),
    (truncate, r"__0_0\.distcp has \d+ bytes, and \S+ ends at byte \d+"),
    (lambda c: (c / ".metadata").unlink(), r"has no \.metadata"),
    (lambda c: (c / ".metadata").write_bytes(b"not a pickle"), r"\.metadata cannot be read"),
    (lambda c: (c / ".metadata").write_bytes(pickle.dumps([1])), r"\.metadata is not an index"),
    (nested, r"is a folder of Megatron's checkpoints.*iter_0000007"),
    (lambda c: (c / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "of the format 'zarr'"),
    (lambda c: (c / "metadata.json").write_text("{}"), "does not name the checkpoint's format"),
]


@pytest.mark.parametrize(("damage", "reason"), BREAKS, ids=[reason for _, reason in BREAKS])
def test_what_is_damaged_is_named(damage: Callable[[Path], object], reason: str, folder: Path, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "dcp", in_hugging_face_names(folder))
    damage(checkpoint)
    with pytest.raises(InvalidJob, match=rf"model\.weights: .*{reason}"):
        check_checkpoint(folder, checkpoint)


def test_names_of_another_architecture(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    checkpoint = saved_by_megatron(tmp_path / "dist", {"embedding.word_embeddings.weight": torch.zeros(4, 4)})
    with pytest.raises(InvalidJob, match="names for the architecture 'gemma' are not known"):
        check_checkpoint(folder, checkpoint)


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_an_index_runs(folder: Path, tmp_path: Path) -> None:
    checkpoint, made = saved(tmp_path / "dcp", in_hugging_face_names(folder)), tmp_path / "made"
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Touch(made)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    check_checkpoint(folder, checkpoint)
    assert not made.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert made.exists()


def test_an_index_may_not_name_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "dcp", in_hugging_face_names(folder))
    data = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(InvalidJob, match=r"outside of the folder"):
        check_checkpoint(folder, checkpoint)
