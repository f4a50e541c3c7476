"""What this rank holds of the model, box by box in Hugging Face terms: for publications that gather nothing."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from millrace.weights.layout import Layout, Place, contiguous
from millrace.weights.memory import Memory
from millrace.weights.views import Seen, seen
from services.trainer.backends.fsdp2.export import manifest
from services.trainer.backends.fsdp2.model import stored_tensors


def shards(module: nn.Module, dtype: str) -> Memory | None:
    """Views of the shards that train, in no other memory. None where a tensor of the model folder is something else
    than boxes of the model's own."""
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


def _boxes(module: nn.Module, name: str, tensor: Tensor) -> dict[str, Seen] | None:
    """Which box of a parameter each tensor is that it is stored as."""
    whole = torch.empty(tensor.shape, device="meta")
    with _NoCopies():
        pieces = revert_weight_conversion(module, {name: whole})  # type: ignore[arg-type]
    found = {}
    for piece, view in pieces.items():
        if view.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return None
        box = seen(whole.shape, (int(view.storage_offset()), tuple(view.shape), tuple(view.stride())))
        if box is None:
            return None
        found[piece] = box
    return found


class _NoCopies(TorchDispatchMode):
    """A copy is the tensor itself, so that one sees what of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def _places(tensor: Tensor, pieces: dict[int, Seen], dims_of: dict[int, int], buffer: int) -> Iterator[Place]:
    """What of each piece lies in this rank's part of the parameter."""
    extents, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        extents, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    strides = tuple((tensor.to_local() if isinstance(tensor, DTensor) else tensor).stride()) or contiguous(extents)
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
