"""Checkpoints: resuming is bit for bit, at any number of ranks; whole or not at all; what Hugging Face reads."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from millrace.errors import InvalidState
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint, huggingface
from services.trainer.checkpoints.exported import write as write_export
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.commands import ControlThread
from tests.models import save_tiny_model
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.checkpoints.saved import assert_same_files, prepare, save
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import trainer
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

TRAINER = {"optimizer": OPTIMIZER, "updates_per_step": 2}


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {info.name: tensor.clone() for info, tensor in backend.export("float32") if tensor is not None}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "adapters"])
def test_resuming_is_bit_for_bit(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    tmp_path: Path,
    lora: dict[str, int] | None,
) -> None:
    spec = job_spec(tied_model, trainer=TRAINER, model={"lora": lora})
    backend, step = local_step(spec, one_rank, control, served)
    for number in (1, 2):
        step(number, random_groups(4, 4, seed=number))
    save(tmp_path / "two", backend, 2)
    metrics = step(3, random_groups(4, 4, seed=3))
    again, resumed = local_step(spec, one_rank, control, served)
    assert checkpoint.load(str(tmp_path / "two"), again).version == 2
    repeated = resumed(3, random_groups(4, 4, seed=3))
    assert repeated["actor/pg_loss"] == metrics["actor/pg_loss"]
    assert repeated["actor/grad_norm"] == metrics["actor/grad_norm"]
    for name, tensor in backend.state().items():
        assert torch.equal(again.state()[name].full_tensor(), tensor.full_tensor()), name


def test_version_0_is_a_checkpoint_too(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    backend = build(job_spec(tied_model), one_rank)
    save(tmp_path / "zero", backend, 0)
    assert checkpoint.load(str(tmp_path / "zero"), backend).version == 0
    assert backend.updates == 0


@pytest.mark.slow
def test_two_ranks_write_what_one_reads(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    """Over the wire: two ranks train, save, and go on; one rank configures from the checkpoint and does the same."""
    algorithm = {"kl": {"name": "k2"}, "kl_coefficient": 0.2, "kl_target": 1e-3, "kl_horizon": 40}
    spec = job_spec(tied_model, trainer=TRAINER, algorithm=algorithm)
    with trainer(served, tmp_path / "log", ranks=2) as running:
        calls = running.calls()
        calls.configure(spec)
        for number in (1, 2):
            served.script.groups = random_groups(4, 4, seed=number)
            calls.step(number, served.script.groups, served.address)
        saved = calls.save(str(tmp_path / "two"))
        assert saved.version == 2 and saved.bytes > 3 * 4 * 103040 and saved.seconds > 0
        served.script.groups = random_groups(4, 4, seed=3)
        there = calls.step(3, served.script.groups, served.address).metrics
        assert calls.load(str(tmp_path / "two")).version == 2
        again = calls.step(3, served.script.groups, served.address).metrics
        assert again["actor/pg_loss"] == there["actor/pg_loss"]
        assert again["actor/kl_coef"] == there["actor/kl_coef"] != pytest.approx(0.2)
        description, _ = checkpoint.open_checkpoint(tmp_path / "two")
        assert description.kl_coefficient == there["actor/kl_coef"]
        calls.save(str(tmp_path / "three"))
    alone = {**algorithm, "kl_coefficient": there["actor/kl_coef"]}
    spec = job_spec(tied_model, trainer=TRAINER, algorithm=alone)
    backend, step = local_step(spec, one_rank, control, served)
    assert checkpoint.load(str(tmp_path / "three"), backend).version == 3
    third = weights(backend)
    assert checkpoint.load(str(tmp_path / "two"), backend).version == 2
    here = step(3, random_groups(4, 4, seed=3))
    assert here["actor/grad_norm"] == pytest.approx(there["actor/grad_norm"], rel=2e-6)
    for name, tensor in weights(backend).items():
        torch.testing.assert_close(tensor, third[name], atol=2e-6, rtol=1e-5)


def test_saved_again_it_is_replaced(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    backend, target = build(job_spec(tied_model), one_rank), tmp_path / "out" / "step-1"
    for version in (1, 2):
        save(target, backend, version)
        assert checkpoint.load(str(target), backend).version == version
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]


def test_a_crash_leaves_the_previous_one_whole(
    one_rank: torch.device, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, target = build(job_spec(tied_model), one_rank), tmp_path / "latest"
    save(target, backend, 1)
    prepare(target, backend, 2)
    begun = prepare(target, backend, 3)
    begun.write()
    assert checkpoint.load(str(target), backend).version == 1
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(os, "rename", interrupted(os.rename))
        begun.commit()
    assert not target.exists()
    assert checkpoint.load(str(target), backend).version == 1
    save(target, backend, 4)
    assert checkpoint.load(str(target), backend).version == 4
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def interrupted(rename: Callable[..., None]) -> Callable[..., None]:
    """Does the first, and the process is interrupted at the second."""
    calls = 0

    def once(*paths: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        rename(*paths)

    return once


def test_refuses_what_is_no_checkpoint_of_this_job(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    backend = build(job_spec(tied_model), one_rank)
    with pytest.raises(InvalidState, match="not a checkpoint"):
        checkpoint.load(str(tmp_path / "nothing"), backend)
    other = build(job_spec(save_tiny_model(tmp_path / "other", tied=False)), one_rank)
    save(tmp_path / "of-another", other, 4)
    with pytest.raises(InvalidState, match="of another model"):
        checkpoint.load(str(tmp_path / "of-another"), backend)
    save(tmp_path / "damaged", backend, 1)
    for file in (tmp_path / "damaged" / "state").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InvalidState, match="damaged"):
        checkpoint.load(str(tmp_path / "damaged"), backend)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["q_proj"], "the checkpoint alone has one for model.layers.0.self_attn.v_proj and 1 more."),
        (["q_proj", "v_proj", "o_proj"], "this job alone has one for model.layers.0.self_attn.o_proj and 1 more."),
    ],
    ids=["fewer", "more"],
)
def test_adapters_of_other_layers_are_refused_before_anything_is_read(
    targets: list[str], told: str, one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    def adapted(targets: list[str], seed: int) -> Backend:
        lora = {"rank": 4, "target_modules": targets}
        return build(job_spec(tied_model, model={"lora": lora}, trainer={"seed": seed}), one_rank)

    save(tmp_path / "saved", adapted(["q_proj", "v_proj"], 0), 1)
    backend = adapted(targets, 1)
    before = {name: tensor.full_tensor().clone() for name, tensor in backend.state().items()}
    with pytest.raises(InvalidState) as found:
        checkpoint.load(str(tmp_path / "saved"), backend)
    assert found.value.what.endswith(told) and "target_modules" in found.value.fix
    after = backend.state()
    assert after.keys() == before.keys() and backend.updates == 0
    assert all(torch.equal(after[name].full_tensor(), tensor) for name, tensor in before.items())


def test_an_unwritable_place_is_told(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidState, match="cannot be written"):
        save(tmp_path / "file" / "step-1", build(job_spec(tied_model), one_rank), 1)


def test_a_full_disk_costs_the_checkpoint_and_not_the_rank(
    one_rank: torch.device, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = build(job_spec(tied_model), one_rank)

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, function in ((huggingface, "save_file"), (huggingface.shutil, "copyfile"), (checkpoint, "write")):
        with monkeypatch.context() as broken, pytest.raises(InvalidState, match="No space left"):
            broken.setattr(module, function, full)
            save(tmp_path / "saved", backend, 1, huggingface_from=tied_model)
        assert not list(tmp_path.glob("*saved*")), "what was written would keep the disk full"
    save(tmp_path / "saved", backend, 1, huggingface_from=tied_model)
    assert checkpoint.load(str(tmp_path / "saved"), backend).version == 1
    adapted = build(job_spec(tied_model, model={"lora": {"rank": 4}}), one_rank)
    with monkeypatch.context() as broken, pytest.raises(InvalidState, match="No space left"):
        broken.setattr(huggingface, "save_tensors", full)
        save(tmp_path / "adapted", adapted, 1)
    assert not (tmp_path / "adapted").exists()


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_transformers_reads_the_export(
    model: str,
    shard_bytes: int,
    one_rank: torch.device,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", shard_bytes)
    folder: Path = request.getfixturevalue(model)
    backend = build(job_spec(folder), one_rank)
    save(tmp_path / "saved", backend, 1, huggingface_from=folder)
    written = tmp_path / "saved" / "huggingface"
    assert (len(list(written.glob("*.safetensors"))) > 1) == (shard_bytes == 100_000)
    read = AutoModelForCausalLM.from_pretrained(written)
    original = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in original.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
    write_export(tmp_path / "saved", tmp_path / "exported")
    assert_same_files(tmp_path / "exported", written)
    tokenizer = AutoTokenizer.from_pretrained(written)
    chat = [{"role": "user", "content": "hello"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected


@pytest.mark.parametrize("dora", [False, True])
def test_an_export_of_an_adapter_is_merged(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
    tmp_path: Path,
    dora: bool,
) -> None:
    spec = job_spec(untied_model, trainer=TRAINER, model={"lora": {"rank": 4, "dora": dora, "merge": True}})
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4, seed=1))
    save(tmp_path / "saved", backend, 1, huggingface_from=untied_model)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"adapter", "state", "trainer.json"}
    write_export(tmp_path / "saved", tmp_path / "exported")
    published = weights(backend)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=1e-6)
    plain = build(job_spec(untied_model), one_rank)
    with pytest.raises(InvalidState, match="trained with adapters of rank 4"):
        checkpoint.load(str(tmp_path / "saved"), plain)


def test_every_checkpoint_has_its_adapter_as_peft_stores_it(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
    tmp_path: Path,
) -> None:
    """It is of the checkpoint's version also where it is written after a later step, and whole or not there."""
    spec = job_spec(untied_model, trainer=TRAINER, model={"lora": {"rank": 4}})
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4, seed=1))
    assert backend.adapter is not None
    first = {name: tensor.clone() for name, tensor in backend.adapter.export() if tensor is not None}
    pending = prepare(tmp_path / "saved", backend, 1)
    step(2, random_groups(4, 4, seed=2))
    assert not (tmp_path / "saved").exists()
    checkpoint.write_now(pending)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"adapter", "state", "trainer.json"}
    written = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    assert written.keys() == first.keys() and all(torch.equal(written[name], first[name]) for name in first)
    assert any(not torch.equal(first[name], tensor) for name, tensor in backend.adapter.export() if tensor is not None)


@pytest.mark.parametrize(("kind", "lora"), [("qwen3_moe", None), ("deepseek_v3", None), ("deepseek_v3", {"rank": 4})])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_mixture_of_experts_is_exported_as_its_folder_has_it(
    kind: str, lora: dict[str, int] | None, dtype: str | None, one_rank: torch.device, tmp_path: Path
) -> None:
    """A router's bias stays float32. An adapter is 0 before its first step."""
    folder = tmp_path / "model"
    tiny.save(kind, folder)
    backend = build(job_spec(folder, model={"lora": lora} if lora else {}), one_rank)
    save(tmp_path / "saved", backend, 1)
    write_export(tmp_path / "saved", tmp_path / "exported", folder, dtype)
    original = load_file(folder / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        kept = tensor.to(torch.bfloat16) if dtype and "e_score" not in name else tensor
        assert exported[name].dtype == kept.dtype and torch.equal(exported[name], kept), name
    loaded = AutoConfig.from_pretrained(tmp_path / "exported")
    assert loaded.dtype == (torch.bfloat16 if dtype else torch.float32)


def test_an_export_says_what_it_lacks(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    save(tmp_path / "saved", build(job_spec(tied_model), one_rank), 1)
    with pytest.raises(InvalidState, match="is not a checkpoint"):
        write_export(tmp_path, tmp_path / "exported")
    with pytest.raises(InvalidState, match="whose folder is not here") as found:
        write_export(tmp_path / "saved", tmp_path / "exported")
    assert found.value.fix == "add --model FOLDER."
    with pytest.raises(InvalidState, match="exists already"):
        write_export(tmp_path / "saved", tmp_path / "saved", tied_model)
    (tmp_path / "saved" / "state" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(InvalidState, match="is damaged"):
        write_export(tmp_path / "saved", tmp_path / "exported", tied_model)
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "model"}
