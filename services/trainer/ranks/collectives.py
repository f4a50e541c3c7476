"""Collectives over the ranks of a trainer, of bytes, numbers and tensors. Nothing is pickled.

Each rank of the default process group (or of `group`) calls the same function at the same point. With one rank a
collective returns what it was given.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BytesValue
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace import errors
from millrace.errors import MillraceError, OutOfMemory, PublicationFailed

KINDS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MillraceError)
}


@dataclass(frozen=True)
class Crash:
    """An exception that is no MillraceError: the rank cannot continue."""

    text: str


Answer = Packed | MillraceError | Crash
"""A reply is still packed: who asked knows its type."""


def encode_answer(answer: Message | MillraceError | Crash) -> bytes:
    packed = Packed()
    match answer:
        case MillraceError():
            packed.Pack(BytesValue(value=encode_error(answer)))
        case Crash(text):
            packed.Pack(BytesValue(value=json.dumps({"crash": text}).encode()))
        case _:
            packed.Pack(answer)
    return packed.SerializeToString()


def decode_answer(data: bytes) -> Answer:
    """The answer that `encode_answer` was given."""
    packed, failure = Packed(), BytesValue()
    packed.ParseFromString(data)
    if not packed.Unpack(failure):
        return packed
    fields = json.loads(failure.value)
    return Crash(fields["crash"]) if "crash" in fields else decode_error(failure.value)


def encode_error(error: MillraceError) -> bytes:
    """The error as JSON. One of a class that millrace.errors does not have is encoded as its nearest class there."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    culprits = list(error.culprits) if isinstance(error, PublicationFailed) else []
    return json.dumps({"kind": kind, "what": error.what, "fix": error.fix, "culprits": culprits}).encode()


def decode_error(data: bytes) -> MillraceError:
    """The error that `encode_error` was given."""
    fields = json.loads(data)
    kind = KINDS[fields["kind"]]
    if kind is PublicationFailed:
        return PublicationFailed(fields["what"], fields["fix"], tuple(fields["culprits"]))
    return kind(fields["what"], fields["fix"])


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def fail_together() -> Iterator[None]:
    """Raises on every rank the MillraceError that one rank raises inside, so that no rank continues and waits for the
    others for ever. The code inside calls no collective after a point that may fail. If several ranks fail it is the
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
    return _reduced(values, dist.ReduceOp.MAX)


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """For each name the sum of the values of all ranks. All ranks give the same names."""
    return _reduced(values, dist.ReduceOp.SUM)


def _reduced(values: Mapping[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
    if world_size() == 1:
        return dict(values)
    names = sorted(values)
    reduced = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(reduced, operation)
    return dict(zip(names, reduced.tolist(), strict=True))
