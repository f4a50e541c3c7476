"""Sharded publications over NCCL, one GPU a rank as far as there are so many: every element in its place, in every
mode; kernels against torch."""

import pytest
import torch

from millrace.bench.publication import measured
from millrace.weights.plans.memory import PieceInMessage
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.round_operations import differing_counts, message_checksums

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
RANKS_A_GPU = 4


@pytest.mark.parametrize(
    ("shape", "trainer", "replica", "replicas"),
    [
        ("tiny", "tp=1", "tp=1", 1),
        ("tiny", "fsdp=2", "tp=1", 1),
        ("tiny", "tp=2", "tp=2", 1),
        ("tiny", "pp=2", "tp=1", 2),
        ("tiny-moe", "ep=2", "tp=2", 1),
        ("tiny-moe", "ep=2", "tp=2,ep=1", 1),
        ("tiny-moe", "tp=1", "tp=1", 3),
        ("tiny-moe", "ep=4", "tp=2", 2),
    ],
)
def test_everything_lies_in_its_place(shape: str, trainer: str, replica: str, replicas: int) -> None:
    asked = {"shape": shape, "trainer": trainer, "replica": replica, "replicas": replicas, "device": "cuda"}
    trainers, workers = (int(part.partition("=")[2]) for part in (trainer, replica.partition(",")[0]))
    ranks = trainers + workers * replicas
    if ranks > RANKS_A_GPU * GPUS:
        pytest.skip(f"{ranks} ranks take turns on {GPUS} GPUs too slowly")
    asked["share_gpus"] = ranks > GPUS
    modes = ["shadow", "inplace", "broadcast"]
    result = measured({**asked, "modes": modes, "repeats": 3, "message_bytes": 32768}, 300.0)
    for row in result["modes"].values():
        assert row["misplaced"] == 0
    assert result["modes"]["inplace"]["peak_bytes"] <= 1.1 * result["modes"]["inplace"]["slot_bytes"] + (64 << 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (7,), (64, 48), (5, 6, 7), (3, 4, 5, 6), (1000, 333)])
def test_kernels_copy_compare_and_sum_as_torch_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from millrace.weights.transfer.kernels import CudaRoundOperations, supported

    assert supported()
    device = torch.device("cuda", 0)
    whole = torch.randn([n + 3 for n in shape] or [1], device=device).mul(50).to(dtype)
    views = [whole[tuple(slice(1, 1 + n) for n in shape)] if shape else whole[0]]
    views += [views[0].transpose(0, 1)] if len(shape) > 1 else []
    for lies in views:
        for kind in {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}:
            size = -(-lies.numel() * kind.itemsize // 16) * 16
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            wire = message[: lies.numel() * kind.itemsize].view(kind).view(lies.shape)
            operations = CudaRoundOperations([PieceInMessage(lies, wire)], {5: message}, device)
            operations.pack()
            operations.sum_messages()
            assert torch.equal(wire, lies.to(kind)) and message_checksums([operations]) == {5: checksum(message)}
            if kind != dtype:
                continue
            operations.note_pieces()
            operations.compare()
            operations.compare_noted()
            assert differing_counts([operations]) == [0]
            kept = lies.clone()
            lies.zero_()
            operations.unpack()
            assert torch.equal(lies, kept)
            lies[(-1,) * lies.dim()] = 77
            operations.compare_noted()
            assert differing_counts([operations]) == [1] and differing_counts([operations]) == [0]
            operations.unpack()
            wire.view(-1)[-1] += 1
            operations.compare()
            assert differing_counts([operations])[0] > 0 and differing_counts([operations]) == [0]
