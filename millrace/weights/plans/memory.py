"""A rank's memory as its layout describes it, and copying pieces between it and messages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from millrace.weights.plans.layout import Layout
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import ShardedPlan


@dataclass(frozen=True)
class Memory:
    """The tensors of one rank that hold, or receive, published weights."""

    manifest: Manifest
    layout: Layout
    buffers: Sequence[torch.Tensor]
    """Tensors that `layout` indexes; its offsets count from a tensor's first element. A sender's may be in host memory:
    they are copied into messages on `message_device` round by round. Pinned memory is read by the kernels of the device
    itself."""
    computed: Mapping[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Buffers of which other values are sent than they hold, by index. Each function returns them in new memory,
    with the buffer's shape and strides. It is called when pieces of the buffer are packed, once a round."""
    message_device: torch.device | None = None
    """Device of the messages; None: that of the buffers."""

    @property
    def device(self) -> torch.device:
        """Device of the messages and of the channel that carries them."""
        if self.message_device is not None:
            return self.message_device
        return self.buffers[0].device if self.buffers else torch.device("cpu")


@dataclass(frozen=True)
class ComputedBuffer:
    """A buffer of which the values that `compute` returns are sent."""

    buffer: torch.Tensor
    compute: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class PieceInMessage:
    """A piece of a tensor twice: two views of the same shape, whose dtypes may differ."""

    in_memory: torch.Tensor
    in_message: torch.Tensor
    computed: ComputedBuffer | None = None
    """The buffer of `in_memory`, if other values are sent than it holds."""


def pieces_in_messages(
    plan: ShardedPlan, messages: Mapping[int, torch.Tensor], memory: Memory, *, every: bool
) -> dict[int, list[PieceInMessage]]:
    """The pieces of each content; `messages` [bytes, uint8] are the memory that holds or receives the bytes of each.
    All places are looked up together, which is much faster than one content after the other.

    With `every`, a piece is listed once for each place in `memory` where it belongs (tied weights may be stored twice);
    else once.
    """
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
    sources = {index: ComputedBuffer(memory.buffers[index], compute) for index, compute in memory.computed.items()}
    views = (place.strides.tolist(), place.boxes.extent.tolist())
    for content, tensor, at, buffer, start, strides, extent in zip(
        *(column.tolist() for column in columns), *views, strict=True
    ):
        held, dtype = memory.buffers[buffer], dtypes[tensor]
        in_memory = torch.as_strided(held.detach(), extent, strides, held.storage_offset() + start)
        in_message = messages[content][at : at + in_memory.numel() * dtype.itemsize]
        found[content].append(PieceInMessage(in_memory, in_message.view(dtype).view(extent), sources.get(buffer)))
    return found


def pack(pieces: Sequence[PieceInMessage]) -> None:
    """Copies pieces from memory into messages, converting to the published dtype. Computed buffers exist one at a
    time."""
    computed: dict[int, list[PieceInMessage]] = {}
    for piece in pieces:
        if piece.computed is None:
            piece.in_message.copy_(piece.in_memory)
        else:
            computed.setdefault(id(piece.computed), []).append(piece)
    for of_buffer in computed.values():
        _pack_computed(of_buffer)


def _pack_computed(pieces: Sequence[PieceInMessage]) -> None:
    """The same for pieces of one buffer whose values are computed."""
    source = pieces[0].computed
    assert source is not None
    values = source.compute()
    assert values.shape == source.buffer.shape and values.stride() == source.buffer.stride()
    for piece in pieces:
        held = piece.in_memory
        start = values.storage_offset() + held.storage_offset() - source.buffer.storage_offset()
        piece.in_message.copy_(torch.as_strided(values, held.shape, held.stride(), start))


def unpack(pieces: Sequence[PieceInMessage]) -> None:
    """Copies pieces from messages into memory."""
    for piece in pieces:
        piece.in_memory.copy_(piece.in_message)


def differing_pieces(pieces: Sequence[PieceInMessage]) -> list[int]:
    """Indices of the pieces whose memory is not bit for bit what their message holds."""
    return [i for i, piece in enumerate(pieces) if not torch.equal(bits(piece.in_memory), bits(piece.in_message))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
