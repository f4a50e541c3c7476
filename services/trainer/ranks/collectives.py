"""What the ranks of a trainer tell each other. Bytes and tensors only; nothing here is pickled.

Every function is a collective: each rank of the default process group (or of `group`) calls it at the same point.
With one rank they do nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace import errors
from millrace.errors import MillraceError


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def fail_together() -> Iterator[None]:
    """What fails inside with a MillraceError on one rank fails on all with that error: none goes on alone and waits
    for the others for ever. Inside there are no collectives after a point that may fail."""
    failure: MillraceError | None = None
    try:
        yield
    except MillraceError as error:
        failure = error
    for answer in gather_bytes(encode_error(failure) if failure is not None else b""):
        if answer:
            raise decode_error(answer) from failure


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank."""
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
    """Every rank's one-dimensional tensor, of the given sizes by rank in `group`."""
    if group is None:
        return [values]
    mine = values.new_zeros(max(sizes))
    mine[: values.numel()] = values
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(everyone, mine, group=group)
    return [part[:size] for part, size in zip(everyone, sizes, strict=True)]


def maxima(values: Mapping[str, float]) -> dict[str, float]:
    """Of each name the largest value of any rank; all ranks give the same names."""
    if world_size() == 1:
        return dict(values)
    names = sorted(values)
    largest = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(names, largest.tolist(), strict=True))


def encode_error(error: MillraceError) -> bytes:
    """A MillraceError as bytes; `decode_error` gives it back."""
    kind = next(k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)
    culprits = list(getattr(error, "culprits", ()))
    return json.dumps({"kind": kind, "what": error.what, "fix": error.fix, "culprits": culprits}).encode()


def decode_error(data: bytes) -> MillraceError:
    fields = json.loads(data)
    kind: type[MillraceError] = getattr(errors, fields["kind"])
    if kind is errors.PublicationFailed:
        return errors.PublicationFailed(fields["what"], fields["fix"], tuple(fields["culprits"]))
    return kind(fields["what"], fields["fix"])
