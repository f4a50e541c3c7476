"""A rank's memory seen through its layout, and moving pieces between it and messages."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from millrace.weights.plans.layout import Layout
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import ShardedPlan

LOOK_EVERY_S = 50e-6


@dataclass(frozen=True)
class Memory:
    """`buffers` are what the layout counts from: tensors whose first element is element 0."""

    manifest: Manifest
    layout: Layout
    buffers: Sequence[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device if self.buffers else torch.device("cpu")


@dataclass(frozen=True)
class PieceInMessage:
    """A piece where it lies, and the part of a message that carries it: views of the same shape."""

    lies: torch.Tensor
    wire: torch.Tensor


def pieces_in_message(
    plan: ShardedPlan, content: int, message: torch.Tensor, memory: Memory, *, every: bool
) -> list[PieceInMessage]:
    """The pieces of a content; `message` is where its bytes are or will be. With `every`, wherever a piece belongs."""
    return pieces_in_messages(plan, {content: message}, memory, every=every)[content]


def pieces_in_messages(
    plan: ShardedPlan, messages: Mapping[int, torch.Tensor], memory: Memory, *, every: bool
) -> dict[int, list[PieceInMessage]]:
    """As `pairs`, of many contents: their places are looked up together."""
    found: dict[int, list[PieceInMessage]] = {content: [] for content in messages}
    if not messages:
        return found
    spans = [plan.pieces_in(content) for content in messages]
    index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    content_of = np.repeat(list(messages), [span.stop - span.start for span in spans])
    pieces = plan.pieces.take(index)
    rows, place = memory.layout.locate(pieces, every=every)
    dtypes = [getattr(torch, tensor.dtype) for tensor in memory.manifest.tensors]
    columns = (content_of[rows], pieces.tensor[rows], plan.at[index[rows]], place.buffer, place.start)
    views = (place.strides.tolist(), place.boxes.extent.tolist())
    for content, tensor, at, buffer, start, strides, extent in zip(
        *(column.tolist() for column in columns), *views, strict=True
    ):
        held, dtype = memory.buffers[buffer], dtypes[tensor]
        lies = torch.as_strided(held.detach(), extent, strides, held.storage_offset() + start)
        wire = messages[content][at : at + lies.numel() * dtype.itemsize]
        found[content].append(PieceInMessage(lies, wire.view(dtype).view(extent)))
    return found


def pack(moves: Sequence[PieceInMessage]) -> None:
    """From where the pieces lie into messages, converting to the dtype of the wire."""
    for pair in moves:
        pair.wire.copy_(pair.lies)


def unpack(moves: Sequence[PieceInMessage]) -> None:
    for pair in moves:
        pair.lies.copy_(pair.wire)


def differing_pieces(moves: Sequence[PieceInMessage]) -> list[int]:
    """Which pieces are not, bit for bit, what their message says."""
    return [i for i, pair in enumerate(moves) if not torch.equal(_bits(pair.lies), _bits(pair.wire))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


class DeviceStream:
    """Work in order: a CUDA stream of its own, or, on a CPU, simply the thread."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        self._entered: AbstractContextManager[Any] = (
            nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        )
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def follow_current(self) -> None:
        """What was put on the caller's stream comes before what this lane does from now on."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def join(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until all of it is done. `check` is called meanwhile, and may raise."""
        while self.stream is not None and not self.stream.query():
            check()
            time.sleep(LOOK_EVERY_S)
