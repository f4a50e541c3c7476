"""The tensors of a model and its optimizer as far as one rank holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Offset = tuple[int, ...]
"""First index of a box in its tensor, in each dimension."""


@dataclass
class LocalBoxes:
    """A tensor of which this rank holds boxes (rectangular parts), each a view of the memory that trains."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    saved_here: bool = True
    """Whether this rank saves them in a checkpoint. A copy that another rank saves is only read from one."""
    parts: dict[Offset, Tensor] = field(default_factory=dict)
    """The boxes."""


NamedTensors = Mapping[str, Tensor | LocalBoxes]
"""Tensors by name. A plain tensor is whole on this rank; a DTensor represents its local shard."""


def local_parts(tensor: Tensor | LocalBoxes) -> dict[Offset, Tensor]:
    """The parts of the tensor that this rank holds, by their offset; empty parts are left out."""
    if isinstance(tensor, LocalBoxes):
        found = tensor.parts
    elif isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        found = {tuple(offset): tensor.to_local()}
    else:
        found = {(0,) * tensor.dim(): tensor}
    return {offset: part.detach() for offset, part in found.items() if part.numel()}


def is_saved_here(tensor: Tensor | LocalBoxes) -> bool:
    """Whether this rank saves its parts of the tensor in a checkpoint."""
    return tensor.saved_here if isinstance(tensor, LocalBoxes) else True
