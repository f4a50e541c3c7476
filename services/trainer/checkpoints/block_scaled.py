"""A quantized tensor of a model folder, read as the unquantized tensor that it stands for (see
`millrace.data.quantization`)."""

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from millrace.data.quantization import BlockScales

Index = EllipsisType | slice | tuple[slice, ...]


class BlockScaledTensor:
    """Each element times the factor of its block. Blocks divide the last two dimensions.

    It has the interface of a safetensors slice: indexing it reads only what is asked for, and the factors of the blocks
    that this touches.
    """

    def __init__(self, stored: Any, scales: Any, blocks: BlockScales) -> None:
        """`stored` and `scales` are safetensors slices of float8 elements and of factors. Raises ValueError where there
        is not one factor for each block."""
        self.shape = tuple(stored.get_shape())
        self._stored = stored
        self._scales = scales
        self._sizes = (*(1 for _ in self.shape[2:]), blocks.rows, blocks.columns)
        found = tuple(scales.get_shape())
        wanted = tuple(-(-n // size) for n, size in zip(self.shape, self._sizes, strict=True))
        if found != wanted:
            raise ValueError(f"scales of shape {found} for blocks of {blocks.rows} × {blocks.columns}, not {wanted}")

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Index) -> Tensor:
        """The elements in a box, float32. `index` has a slice with step 1 for each of the first dimensions."""
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        asked = [*given, *(slice(None) for _ in self.shape[len(given) :])]
        box = [slice(*part.indices(n)[:2]) for part, n in zip(asked, self.shape, strict=True)]
        if any(part.start >= part.stop for part in box):
            return torch.empty([max(0, part.stop - part.start) for part in box])
        touched = [
            slice(part.start // size, (part.stop - 1) // size + 1) for part, size in zip(box, self._sizes, strict=True)
        ]
        values: Tensor = self._stored[tuple(box)].to(torch.float32)
        return _scaled(values, self._scales[tuple(touched)].to(torch.float32), box[-2:], self._sizes[-2:])


def _scaled(values: Tensor, scales: Tensor, box: list[slice], sizes: tuple[int, ...]) -> Tensor:
    """Multiplies `values`, a box of rows and columns, by the factors of the blocks that it touches, in place."""
    rows, columns = box
    first_row, first_column = rows.start // sizes[0], columns.start // sizes[1]
    wide = scales.index_select(-1, torch.arange(columns.start, columns.stop) // sizes[1] - first_column)
    for number in range(wide.shape[-2]):  # one row of blocks at a time: no second tensor of the size of `values`
        begin = max(rows.start, (first_row + number) * sizes[0]) - rows.start
        end = min(rows.stop, (first_row + number + 1) * sizes[0]) - rows.start
        values[..., begin:end, :].mul_(wide[..., number : number + 1, :])
    return values
