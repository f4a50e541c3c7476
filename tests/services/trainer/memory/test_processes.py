"""Ranks as processes of which one has no memory left. A user's loss is where it runs out."""

import time
from pathlib import Path

import pytest

from millrace.errors import OutOfMemory
from millrace.spec import JobSpec
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import trainer

pytestmark = pytest.mark.slow

LOSS = """
import torch
import torch.distributed as dist
from torch import Tensor


def limited(*, logprobs_bt: Tensor, advantages_bt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if dist.get_rank() == {rank} and logprobs_bt.numel() > {elements}:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return -advantages_bt * logprobs_bt, {{}}
"""
BUDGET, ELEMENTS = 128, 50
"""Micro-batches of half the budget have fewer elements."""


def limited(folder: Path, model: Path, rank: int, backend: str) -> JobSpec:
    file = folder / "limited.py"
    file.write_text(LOSS.format(rank=rank, elements=ELEMENTS))
    algorithm = {"policy_loss": {"name": f"{file}:limited"}}
    return job_spec(model, algorithm=algorithm, trainer={"token_budget": BUDGET, "backend": backend})


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp2", marks=pytest.mark.matrix)])
def test_one_rank_makes_the_step_again(
    backend: str, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    """The covering part of FSDP2 is in test_out_of_memory.py, in one process."""
    groups = served.script.groups = random_groups(4, 4)
    with trainer(served, tmp_path / "log") as running:
        calls = running.calls()
        calls.configure(limited(tmp_path, tied_model, rank=0, backend=backend))
        with pytest.raises(OutOfMemory, match="rank 0 ran out of memory in the policy's update, step 1") as raised:
            calls.step(1, groups, served.address)
        assert "It held: weights" in raised.value.what and "saves about" in raised.value.fix, raised.value
        again = calls.step(1, groups, served.address, token_budget=BUDGET // 2).metrics
        other = job_spec(tied_model, trainer={"token_budget": BUDGET // 2, "backend": backend})
        file = limited(tmp_path, tied_model, rank=7, backend=backend).algorithm
        calls.configure(other.model_copy(update={"algorithm": file}), job="job-2")
        plain = calls.step(1, groups, served.address, job="job-2").metrics
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "batch/microbatches"):
            assert again[name] == plain[name], name
        held = {name for name in again if name.startswith("memory/update/")}
        held = {name for name in held if "/predicted/" not in name}
        assert held == {f"memory/update/{part}" for part in ("weights", "gradients", "optimizer")}
        assert again["memory/update/weights"] == pytest.approx(again["memory/update/predicted/weights"], rel=0.05)


def test_one_of_two_ranks_ends_the_trainer_and_the_caller_is_told(
    served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    """The other rank waits for it in a collective."""
    groups = served.script.groups = random_groups(4, 4)
    with trainer(served, tmp_path / "log", ranks=2, MILLRACE_SILENT_S="120") as running:
        calls = running.calls()
        calls.configure(limited(tmp_path, tied_model, rank=1, backend="fsdp2"))
        began = time.monotonic()
        with pytest.raises(OutOfMemory, match="rank 1 ran out of memory in the policy's update, step 1"):
            calls.step(1, groups, served.address)
        assert time.monotonic() - began < 60
        assert running.process.wait(60) != 0
