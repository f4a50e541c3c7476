"""How the model is divided over ranks changes no number: copies over groups of ranks (HSDP), weights in host memory.

Each rank has two micro-batches of an update. Gradients and losses are those of one rank within 2e-5: AdamW's first
steps have the size of the learning rate, so that weights say little of a gradient's scale.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.memory.ledger import Part
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import loss, trained
from tests.services.trainer.backends.fsdp2.test_shards import check
from tests.services.trainer.checkpoints.saved import save
from tests.services.trainer.groups import job_spec

Cases = Mapping[str, dict[str, Any]]
CASES: Cases = {
    "plain": {},
    "copies": {"fsdp_size": 2},
}
MATRIX: Cases = {
    "copies-host": {"fsdp_size": 2, "offload_parameters": True, "offload_activations": True},
    "host": {"offload_parameters": True},
    "copies-moments": {"fsdp_size": 2, "offload_optimizer": True},
}
"""For `make test-all`: test_sequence_parallel.py has copies with all of these."""
RANKS = 4
LENGTHS = [(3, 9), (12, 4), (7, 20), (5, 5), (2, 8), (4, 1), (9, 11), (6, 3)]
CLOSE = 2e-5


def micro_batches(mine: slice) -> list[MicroBatch]:
    """One of each of the sequences."""
    drawn = samples(LENGTHS)
    return [MicroBatch.pack(drawn, [row]) for row in range(len(drawn))[mine]]


def first_pass(backend: Any, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Gradients, and the losses of these micro-batches. The gradients are gone then."""

    def told(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Tensor]:
        return (value := loss(batch, scores)[0]), value.detach()

    losses = backend.forward_backward(batches, told, temperature=1.0)
    found = {name: each.grad.full_tensor().clone() for name, each in backend._trained.items()}
    backend.zero_gradients()
    return {**found, "losses": torch.stack(losses)}


def on_rank(rank: int, folder: Path, model: Path, cases: Cases) -> None:
    """A pass, and three updates, on this rank's quarter of the samples; every case saves gradients, a checkpoint and
    what it exports."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=RANKS)
    for name, options in cases.items():
        backend: Any = build(job_spec(model, trainer={"backend_options": options}), torch.device("cpu"))
        batches = micro_batches(slice(rank, None, RANKS))
        if options.get("fsdp_size"):
            check_exchanges(backend, batches, late=not options.get("offload_parameters"))
            check_abandoned(backend, batches)
        save_file(first_pass(backend, batches), folder / f"{name}-{rank}.gradients")
        trained(backend, samples(LENGTHS)[rank::RANKS])
        save(folder / f"checkpoint-{name}", backend, 3)
        exported = {info.name: tensor for info, tensor in backend.export("float32")}
        if rank == 0:
            save_file({name: tensor for name, tensor in exported.items() if tensor is not None}, folder / name)
    check(model, fsdp_size=2)
    dist.destroy_process_group()


def check_exchanges(backend: Any, batches: Sequence[MicroBatch], *, late: bool) -> None:
    """Copies exchange as many gradients for two micro-batches as for one where they are added up late."""
    counts, all_reduce = list[int](), dist.all_reduce
    for number in (1, len(batches)):
        with patch.object(dist, "all_reduce", side_effect=all_reduce) as counted:
            first_pass(backend, batches[:number])
        counts.append(counted.call_count)
    assert counts[0] > 0 and counts[1] == counts[0] * (1 if late else len(batches))


def check_abandoned(backend: Any, batches: Sequence[MicroBatch]) -> None:
    """A pass whose second loss fails leaves nothing for the next one."""
    expected = first_pass(backend, batches)

    def failing(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
        if batch is batches[1]:
            raise InvalidJob("no loss", "none")
        return loss(batch, scores)

    with pytest.raises(InvalidJob):
        backend.forward_backward(batches, failing, temperature=1.0)
    backend.zero_gradients()
    for name, values in first_pass(backend, batches).items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_adds_its_gradients_up_where_they_are(dtype: str, one_rank: torch.device, tied_model: Path) -> None:
    """Until then they stay where the backward pass adds them up, and a pass that ends early leaves nothing there."""
    backend: Any = build(job_spec(tied_model, trainer={"dtype": dtype}), one_rank)
    batches = micro_batches(slice(None))
    check_abandoned(backend, batches)
    expected = first_pass(backend, batches)
    backend.forward_backward(batches[:2], loss, temperature=1.0, more=True)
    assert backend.held()[Part.GRADIENTS] and all(each.grad is None for each in backend._trained.values())
    backend.abandon_pass()
    torch.testing.assert_close(first_pass(backend, batches), expected, atol=0.0, rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(MATRIX, marks=pytest.mark.matrix)], ids=["covering", "rest"])
def test_no_division_changes_a_weight(cases: Cases, one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    """Losses, gradients, and weights after three updates are those of one rank, which reads the checkpoint of each
    division."""
    backend = build(job_spec(untied_model), one_rank)
    one = first_pass(backend, micro_batches(slice(None)))
    losses = one.pop("losses")
    trained(backend, samples(LENGTHS))
    expected = {info.name: tensor for info, tensor in backend.export("float32") if tensor is not None}
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, tmp_path, untied_model, cases)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    for name in cases:
        for rank in range(RANKS):
            gradients = load_file(tmp_path / f"{name}-{rank}.gradients")
            torch.testing.assert_close(gradients.pop("losses"), losses[rank::RANKS], atol=CLOSE, rtol=CLOSE)
            torch.testing.assert_close(gradients, one, atol=CLOSE, rtol=0.0)
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
