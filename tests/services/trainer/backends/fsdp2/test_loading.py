"""Model folders are read into shards: each rank reads its share of the bytes, and all values are transformers'."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from millrace.errors import InvalidJob
from millrace.fsdp2.rules import check_submission
from services.trainer.backends import build
from services.trainer.backends.fsdp2 import loading, model_check
from services.trainer.backends.fsdp2.loading import ModelFolder, computed_buffers
from services.trainer.checkpoints.model_files import ModelFiles
from tests.forked import CONTEXT
from tests.image_models import PUBLISHED_EXPERTS, opened_model, save_image_model
from tests.models import save_tiny_model
from tests.services.trainer.backends.fsdp2.test_backend import moe_model
from tests.services.trainer.groups import job_spec

PPO: dict[str, Any] = {"advantage": "gae", "critic": {}, "kl": {"name": "k3"}}
DORA: dict[str, Any] = {"lora": {"rank": 2, "dora": True, "init": "gaussian", "merge": True}}


class Counted:
    """A safetensors slice that adds up how many elements are read."""

    read = 0

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        values: torch.Tensor = self._stored[index]
        Counted.read += values.numel()
        return values


def count_reading() -> None:
    """From now on this process counts what it reads, and fails where it reads a whole model."""
    original = ModelFiles.tensor
    ModelFiles.tensor = lambda self, name: Counted(original(self, name))  # type: ignore[method-assign]
    ModelFolder.whole = lambda self: pytest.fail("the whole model is read")  # type: ignore[method-assign]


def parameters_of(backend: Any) -> dict[str, torch.Tensor]:
    """Every tensor of policy, reference and critic, whole."""
    models = {"policy": backend._model, "reference": backend._reference}
    models |= {"critic": backend.critic._model} if backend.critic is not None else {}
    return {
        f"{role}.{name}": tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor
        for role, model in models.items()
        if model is not None
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def on_rank(rank: int, folder: Path, model: Path, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    count_reading()
    for name, parts in (("all", {"algorithm": PPO}), ("dora", {"model": DORA})):
        Counted.read = 0
        backend = build(job_spec(model, **parts), torch.device("cpu"))
        models = 3 if name == "all" else 1
        assert 0.4 * models * size < Counted.read <= 0.6 * models * size, (name, Counted.read, size)
        found = parameters_of(backend)
        if rank == 0:
            torch.save(found, folder / name)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_each_of_two_ranks_reads_half_and_holds_the_same(one_rank: torch.device, tmp_path: Path, kind: str) -> None:
    """Policy, reference and critic, and adapters that follow from the weights, equal those of one rank, which reads the
    whole folder by transformers."""
    folder = save_tiny_model(tmp_path / "model", tied=False) if kind == "dense" else moe_model(tmp_path / "model")
    size = sum(tensor.numel() for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, tmp_path, folder, size)) for rank in range(2)]
    for process in ranks:
        process.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "boxes", lambda *_: None)
        expected = {
            name: parameters_of(build(job_spec(folder, **parts), one_rank))
            for name, parts in (("all", {"algorithm": PPO}), ("dora", {"model": DORA}))
        }
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [0, 0]
    for name, tensors in expected.items():
        found = torch.load(tmp_path / name)
        assert found.keys() == tensors.keys()
        for tensor, values in tensors.items():
            torch.testing.assert_close(found[tensor], values, rtol=1e-6, atol=1e-7, msg=tensor)


@pytest.mark.parametrize("kind", PUBLISHED_EXPERTS)
def test_experts_in_one_tensor_are_read_by_each_rank(
    one_rank: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without transformers, which would read the whole folder on rank 0. It reads the same, and so it does of a folder
    that it wrote itself."""
    folder = save_image_model(tmp_path / "model", kind=kind)
    with monkeypatch.context() as patch:
        patch.delattr(ModelFolder, "whole")
        found = parameters_of(build(job_spec(folder), one_rank))
    monkeypatch.setattr(loading, "boxes", lambda *_: None)
    expected = parameters_of(build(job_spec(folder), one_rank))
    opened_model(folder).save_pretrained(tmp_path / "again")
    again = parameters_of(build(job_spec(tmp_path / "again"), one_rank))
    assert found.keys() == expected.keys() == again.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and torch.equal(again[name], tensor), name


def test_experts_of_which_the_shape_does_not_say_what_comes_first_are_refused(
    one_rank: torch.device, tmp_path: Path
) -> None:
    folder = save_image_model(tmp_path / "model", kind="qwen3_vl_moe")
    config = json.loads((folder / "config.json").read_text())
    for inner in (32, 64):
        config["text_config"]["moe_intermediate_size"] = inner
        (folder / "config.json").write_text(json.dumps(config))
        for check in (check_submission, model_check.check, lambda spec: build(spec, one_rank)):
            with pytest.raises(InvalidJob, match=f"with hidden_size 64 and moe_intermediate_size {inner} its experts"):
                check(job_spec(folder))


def llama(folder: Path, **rope: Any) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_buffers_are_those_of_a_loaded_model(tmp_path: Path, rope: dict[str, Any]) -> None:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(llama(tmp_path / "model", **rope))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(loaded.config)
    found, expected = computed_buffers(empty), dict(loaded.named_non_persistent_buffers())
    assert expected and found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_folder_that_lacks_a_tensor_is_refused(one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tensors,) = [load_file(file) for file in untied_model.glob("*.safetensors")]
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({other: t for other, t in tensors.items() if other != name}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text((untied_model / "config.json").read_text())
    with pytest.raises(InvalidJob, match=f"lacks 1 of the model's tensors, the first {name}"):
        build(job_spec(tmp_path / "model"), one_rank)


def with_tensors(model: Path, folder: Path, added: dict[str, torch.Tensor]) -> Path:
    """The model's folder with more tensors."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return folder


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def other_head(model: Path) -> dict[str, torch.Tensor]:
    (file,) = model.glob("*.safetensors")
    changed = load_file(file)[EMBEDDING].clone()
    changed[-1, -1] += 1
    return {HEAD: changed}


LOST: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    rf"stores {HEAD} with other values than {EMBEDDING}, to which its config.json ties it": other_head,
    r"stores v_head\.weight, for which the model of its config\.json has no place": lambda _: {
        "v_head.weight": torch.ones(1, 64)
    },
    r"model\.layers\.0\.self_attn\.q_proj\.bias and 2 more, for which the model": lambda _: {
        f"model.layers.0.self_attn.{name}.bias": torch.ones(8) for name in ("k_proj", "o_proj", "q_proj", "q_r", "q_s")
    },
}


@pytest.mark.parametrize("by_transformers", [False, True])
@pytest.mark.parametrize("told", LOST, ids=["head", "value head", "biases"])
def test_a_stored_tensor_that_the_model_does_not_take_is_refused_by_name(
    told: str, by_transformers: bool, one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    folder = with_tensors(tied_model, tmp_path / "model", LOST[told](tied_model))
    with pytest.MonkeyPatch.context() as patch:
        if by_transformers:
            patch.setattr(loading, "boxes", lambda *_: None)
        with pytest.raises(InvalidJob, match=rf"model\.path: .*{told}"):
            build(job_spec(folder), one_rank)


@pytest.mark.parametrize("by_transformers", [False, True])
def test_what_models_ignore_or_may_repeat_is_no_mistake(
    by_transformers: bool, one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    (file,) = tied_model.glob("*.safetensors")
    added = {
        HEAD: load_file(file)[EMBEDDING].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "mtp.fc.weight": torch.ones(4, 4),
        "model.layers.9.mlp.up_proj.weight": torch.ones(4, 4),
    }
    folder = with_tensors(tied_model, tmp_path / "model", added)
    with pytest.MonkeyPatch.context() as patch:
        if by_transformers:
            patch.setattr(loading, "boxes", lambda *_: None)
        found = parameters_of(build(job_spec(folder, algorithm=PPO), one_rank))
    same = parameters_of(build(job_spec(tied_model, algorithm=PPO), one_rank))
    assert found.keys() == same.keys() and all(torch.equal(found[name], same[name]) for name in same)


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ({"v_head.weight": torch.ones(1, 64)}, r"stores v_head\.weight, for which"),
        ({HEAD: torch.ones(300, 64)}, rf"stores {HEAD} with other values than {EMBEDDING}"),
    ],
)
def test_validation_tells_it_by_name_or_shape(
    added: dict[str, torch.Tensor], told: str, tied_model: Path, tmp_path: Path
) -> None:
    model_check.check(job_spec(tied_model))
    with pytest.raises(InvalidJob, match=told):
        model_check.check(job_spec(with_tensors(tied_model, tmp_path / "model", added)))


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ({"model.layers.0.extra.weight": torch.ones(4)}, r"stores model\.layers\.0\.extra\.weight, for which"),
        ({"score.weight": torch.ones(5, 64)}, r"its score\.weight is \(5, 64\)"),
        ({"score.bias": torch.ones(1)}, r"its score\.bias is not 0"),
    ],
)
def test_validation_looks_at_the_critics_folder_too(
    added: dict[str, torch.Tensor], told: str, tied_model: Path, tmp_path: Path
) -> None:
    good = with_tensors(tied_model, tmp_path / "good", {"score.weight": torch.ones(1, 64)})
    for folder in (None, str(good)):
        model_check.check(job_spec(tied_model, algorithm=PPO | {"critic": {"path": folder}}))
    folder = str(with_tensors(tied_model, tmp_path / "critic", added))
    with pytest.raises(InvalidJob, match=rf"algorithm\.critic\.path: .*{told}"):
        model_check.check(job_spec(tied_model, algorithm=PPO | {"critic": {"path": folder}}))
