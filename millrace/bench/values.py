"""Weights that are computed from their tensor and position, so that every element can be checked alone."""

from collections.abc import Iterator

import torch

from millrace.weights.plans.memory import Memory

CHUNK = 1 << 24
"""Elements that are computed at once."""


def fill(memory: Memory, version: int) -> None:
    """Writes a version's weights into all boxes of a rank's memory."""
    for view, (tensor, offset) in _views(memory):
        for first, part in _parts(view):
            part.copy_(_values(part, tensor, (offset[0] + first, *offset[1:]) if offset else offset, version))


def misplaced(memory: Memory, version: int) -> int:
    """Number of boxes that are not bit for bit what belongs there in this version."""
    wrong = 0
    for view, (tensor, offset) in _views(memory):
        for first, part in _parts(view):
            expected = _values(part, tensor, (offset[0] + first, *offset[1:]) if offset else offset, version)
            if not torch.equal(part, expected.to(part.dtype)):
                wrong += 1
                break
    return wrong


def _views(memory: Memory) -> Iterator[tuple[torch.Tensor, tuple[int, tuple[int, ...]]]]:
    """Each box as a view of its buffer, with its tensor and offset."""
    layout, boxes = memory.layout, memory.layout.boxes
    columns = (boxes.tensor, boxes.offset, boxes.extent, layout.buffer, layout.start, layout.strides)
    for tensor, offset, extent, buffer, start, strides in zip(*(column.tolist() for column in columns), strict=True):
        held = memory.buffers[buffer]
        yield torch.as_strided(held, extent, strides, held.storage_offset() + start), (tensor, tuple(offset))


def _parts(view: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    rows = max(1, CHUNK // max(1, view[0].numel())) if view.dim() else 1
    for first in range(0, view.shape[0], rows):
        yield first, view[first : first + rows]


def _values(like: torch.Tensor, tensor: int, offset: tuple[int, ...], version: int) -> torch.Tensor:
    """bfloat16 numbers between 2^-7 and 2^-5, of either sign; neighbours differ. They are exact in float32, and a model
    with such weights does not overflow."""
    bits = torch.full((), tensor * 7919 + version * 101, dtype=torch.int32, device=like.device)
    for dim, (extent, first) in enumerate(zip(like.shape, offset, strict=True)):
        along = torch.arange(first, first + extent, dtype=torch.int32, device=like.device)
        shape = [1] * like.dim()
        shape[dim] = extent
        bits = bits + (along * (40503 if dim == 0 else 30011 + 2 * dim)).view(shape)
    bits = ((bits ^ (bits >> 9)) & 0x80FF) | 0x3C00
    return bits.expand(like.shape).to(torch.int16).view(torch.bfloat16)
