"""Two GPUs that share a micro-batch (Ulysses) in bfloat16, with torch's kernel for packed sequences in compiled layers,
beside the same micro-batch on one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.trainer.backends import build
from services.trainer.protocol.microbatch import MicroBatch
from tests.forked import CONTEXT
from tests.models import FOR_KERNELS, save_tiny_model
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import loss
from tests.services.trainer.groups import job_spec

pytestmark = pytest.mark.gpu(2)
RANKS = 2
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sequence_parallel_size": 2},
    {"sequence_parallel_size": 2, "compile_layers": False},
)


def on_rank(rank: int, folder: Path, model: Path, kind: str) -> None:
    """Rank 0 writes log-probabilities and the gradient's norm for each of the options."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), RANKS)
    backend_name = "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo"
    dist.init_process_group(
        backend_name, store=store, rank=rank, world_size=RANKS, device_id=device if kind == "cuda" else None
    )
    drawn = samples([(30, 400), (7, 90), (250, 31), (1, 1)])
    batch, padding = MicroBatch.pack(drawn, range(len(drawn))), MicroBatch.pack([], [])
    found = []
    for options in OPTIONS:
        trainer = {"dtype": "bfloat16", "token_budget": 1024, "backend_options": options}
        backend = build(job_spec(model, trainer=trainer), device)
        (scores,) = backend.scores([batch], temperature=1.0)
        # Without sharing, the other rank has a batch of its own: none.
        backend.forward_backward([batch if backend.data_parallel.rank == 0 else padding], loss, temperature=1.0)
        found.append([scores.logprobs_r.tolist(), backend.gradient_norm()])
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compare(folder: Path, kind: str) -> None:
    model = save_tiny_model(folder / "model", tied=False, sizes=FOR_KERNELS)
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, folder, model, kind)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(280)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    (logprobs, norm), *shared = json.loads((folder / "found.json").read_text())
    for shared_logprobs, shared_norm in shared:
        difference = (torch.tensor(shared_logprobs) - torch.tensor(logprobs)).abs()
        assert difference.mean() < 0.02 and difference.max() < 0.3
        assert shared_norm == pytest.approx(norm, rel=0.03)


def test_two_gpus_that_share_a_micro_batch_compute_what_one_does(tmp_path: Path) -> None:
    compare(tmp_path, "cuda")
