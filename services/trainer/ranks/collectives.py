"""Collectives over the ranks of a trainer, of bytes, numbers and tensors. Nothing is pickled.

Each rank of the default process group (or of `group`) calls the same function at the same point. With one rank a
collective returns what it was given.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace.errors import MillraceError, OutOfMemory
from services.trainer.ranks.answers import decode_error, encode_error


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def fail_together() -> Iterator[None]:
    """Raises on every rank the MillraceError that one rank raises inside, so that no rank continues and waits for the
    others for ever. The code inside calls no collective after a point that may fail. Where several ranks fail it is the
    error of the first, or of the first that has no memory left: what failed elsewhere may follow from that."""
    failure: MillraceError | None = None
    try:
        yield
    except MillraceError as error:
        failure = error
    answers = gather_bytes(encode_error(failure) if failure is not None else b"")
    errors = [decode_error(data) for data in answers if data]
    if errors:
        raise next((error for error in errors if isinstance(error, OutOfMemory)), errors[0]) from failure


def gather_bytes(data: bytes) -> list[bytes]:
    """The bytes of every rank, by rank."""
    if world_size() == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = int(max(sizes))
    if longest == 0:
        return [b""] * world_size()
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    all_data = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(all_data, mine)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(all_data, sizes, strict=True)]


def gather_flat(values: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> list[Tensor]:
    """The one-dimensional tensor of every rank of `group`; `sizes` are their lengths, by rank."""
    if group is None:
        return [values]
    mine = values.new_zeros(max(sizes))
    mine[: values.numel()] = values
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(everyone, mine, group=group)
    return [part[:size] for part, size in zip(everyone, sizes, strict=True)]


def maxima(values: Mapping[str, float]) -> dict[str, float]:
    """For each name the largest value of any rank. All ranks give the same names."""
    if world_size() == 1:
        return dict(values)
    names = sorted(values)
    largest = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(names, largest.tolist(), strict=True))
