"""Named tensors of a model and its optimizer as this rank has them: boxes, in the memory that trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Offset = tuple[int, ...]


@dataclass
class LocalBoxes:
    """A tensor of which this rank has boxes, each a view of the memory it lies in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    written: bool = True
    """Whether this rank offers them to a checkpoint; a copy that another rank offers is only read."""
    parts: dict[Offset, Tensor] = field(default_factory=dict)


NamedTensors = Mapping[str, Tensor | LocalBoxes]
"""A plain tensor is whole on this rank, a DTensor is what of it lies here."""


def local_parts(tensor: Tensor | LocalBoxes) -> dict[Offset, Tensor]:
    """What of it lies here, by where in the whole tensor it begins; nothing empty."""
    if isinstance(tensor, LocalBoxes):
        found = tensor.parts
    elif isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        found = {tuple(offset): tensor.to_local()}
    else:
        found = {(0,) * tensor.dim(): tensor}
    return {offset: part.detach() for offset, part in found.items() if part.numel()}


def is_saved_here(tensor: Tensor | LocalBoxes) -> bool:
    return tensor.written if isinstance(tensor, LocalBoxes) else True
