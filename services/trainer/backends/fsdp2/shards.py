"""The boxes of the model folder's tensors that this rank holds, for publications that gather nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from millrace.weights.loader.stored import stored_tensors, views
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.views import ViewedBox, viewed_box
from services.trainer.backends.fsdp2.export import manifest


def shards(module: nn.Module, dtype: str) -> Memory | None:
    """Views of the shards that train, without a copy. None where a tensor of the model folder is not made of boxes of
    the model's parameters."""
    published = manifest(module, dtype)
    number = {tensor.name: i for i, tensor in enumerate(published.tensors)}
    places: list[Place] = []
    buffers: list[Tensor] = []
    for name, tensor in stored_tensors(module):
        found = _boxes(module, name, tensor)
        if found is None:
            return None
        boxes = {number[piece]: box for piece, box in found.items()}
        places += _places(tensor, boxes, {i: len(published.tensors[i].shape) for i in boxes}, len(buffers))
        buffers.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return Memory(published, Layout.of(places, published), [buffer.detach() for buffer in buffers])


def _boxes(module: nn.Module, name: str, tensor: Tensor) -> dict[str, ViewedBox] | None:
    """For each tensor as which a parameter is stored: which box of the parameter it is."""
    whole = torch.empty(tensor.shape, device="meta")
    if (stored := views(module, name, whole)) is None:
        return None
    found = {}
    for piece, view in stored.items():
        box = viewed_box(whole.shape, (int(view.storage_offset()), tuple(view.shape), tuple(view.stride())))
        if box is None:
            return None
        found[piece] = box
    return found


def _places(tensor: Tensor, pieces: dict[int, ViewedBox], dims_of: dict[int, int], buffer: int) -> Iterator[Place]:
    """The parts of each stored tensor that are in this rank's part of the parameter."""
    extents, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        extents, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    strides = tuple((tensor.to_local() if isinstance(tensor, DTensor) else tensor).stride()) or row_major_strides(
        extents
    )
    for number, piece in pieces.items():
        low = [max(a, b) for a, b in zip(piece.offset, offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(piece.offset, piece.extent, offsets, extents, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        start = sum((a - b) * s for a, b, s in zip(low, offsets, strides, strict=True))
        dims = [piece.along.index(view) if view in piece.along else None for view in range(dims_of[number])]
        yield Place(
            number,
            tuple(0 if d is None else low[d] - piece.offset[d] for d in dims),
            tuple(1 if d is None else high[d] - low[d] for d in dims),
            buffer,
            start,
            tuple(0 if d is None else strides[d] for d in dims),
        )
