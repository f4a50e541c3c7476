"""How the model is divided over ranks changes no number: copies over groups of ranks (HSDP), weights in host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from millrace.errors import InvalidJob
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import trained
from tests.services.trainer.backends.fsdp2.test_shards import check
from tests.services.trainer.checkpoints.saved import save
from tests.services.trainer.groups import job_spec

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "copies": {"fsdp_size": 2},
    "host": {"offload_parameters": True},
    "copies-host": {"fsdp_size": 2, "offload_parameters": True, "offload_activations": True},
    "copies-moments": {"fsdp_size": 2, "offload_optimizer": True},
}
RANKS = 4


def on_rank(rank: int, folder: Path, model: Path) -> None:
    """Three updates on this rank's quarter of the samples; every case saves a checkpoint and what it exports."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=RANKS)
    for name, options in CASES.items():
        backend = build(job_spec(model, trainer={"backend_options": options}), torch.device("cpu"))
        trained(backend, samples([(3, 9), (12, 4), (7, 20), (5, 5)])[rank::RANKS])
        save(folder / f"checkpoint-{name}", backend, 3)
        exported = {info.name: tensor for info, tensor in backend.export("float32")}
        if rank == 0:
            save_file({name: tensor for name, tensor in exported.items() if tensor is not None}, folder / name)
    check(model, fsdp_size=2)
    dist.destroy_process_group()


@pytest.mark.slow
def test_no_division_changes_a_weight(one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    """Weights after three updates equal those of one rank, and a checkpoint of each division is read by one rank."""
    backend = build(job_spec(untied_model), one_rank)
    trained(backend, samples([(3, 9), (12, 4), (7, 20), (5, 5)]))
    expected = {info.name: tensor for info, tensor in backend.export("float32") if tensor is not None}
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, tmp_path, untied_model)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    for name in CASES:
        found = load_file(tmp_path / name)
        for tensor, values in expected.items():
            # AdamW's first steps have the size of the learning rate: a gradient near 0 may be rounded to either sign.
            assert (found[tensor] - values).abs().mean() < 1e-5, f"{name}: {tensor}"
        checkpoint.load(str(tmp_path / f"checkpoint-{name}"), backend)
        for info, tensor in backend.export("float32"):
            assert torch.equal(tensor, found[info.name]), info.name


def test_a_size_that_does_not_divide_is_refused(one_rank: torch.device, tied_model: Path) -> None:
    with pytest.raises(InvalidJob) as refused:
        build(job_spec(tied_model, trainer={"backend_options": {"fsdp_size": 2}}), one_rank)
    assert refused.value.what.startswith("trainer.backend_options.fsdp_size: 2:")
