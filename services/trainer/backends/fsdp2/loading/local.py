"""This rank's part of a tensor of a sharded module."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class LocalPart:
    """The box of a tensor that this rank holds."""

    values: Tensor
    offset: tuple[int, ...]
    """First index of the box in the tensor, in each dimension."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalPart":
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), (0,) * tensor.dim())
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local().detach(), tuple(offset))

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Takes this rank's box of a tensor that is whole here."""
        box = tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))
        self.values.copy_(whole[box])
