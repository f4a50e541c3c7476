"""A rank's layout: the boxes of manifest tensors that it holds or wants, and where each is in its memory. Torch-free.

Other ranks need only the boxes. Buffer, start and strides, in elements, matter to the rank itself alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from millrace.weights.plans.boxes import Boxes, Ints, overlaps
from millrace.weights.plans.manifest import Manifest


@dataclass(frozen=True)
class Place:
    """Place of one box in memory: the box of `extent` at `offset` in manifest tensor `tensor` is in buffer `buffer`
    from element `start` on, with `strides` (elements), one for each dimension of the tensor."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    buffer: int
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """N boxes and their places, as columns."""

    boxes: Boxes
    buffer: Ints
    """[N] index of the rank's buffer that the box is in."""
    start: Ints
    """[N] elements from the buffer's first element."""
    strides: Ints
    """[N, D] elements; 0 for dimensions that the tensor does not have."""

    @classmethod
    def of(cls, places: Iterable[Place], manifest: Manifest) -> Self:
        """A layout of `places`; empty boxes are left out."""
        kept = [place for place in places if all(place.extent)]
        boxes = Boxes.of(((p.tensor, p.offset, p.extent) for p in kept), most_dims(manifest))
        strides = np.zeros_like(boxes.offset)
        for i, place in enumerate(kept):
            strides[i, : len(place.strides)] = place.strides
        buffer, start = (
            (np.fromiter(v, np.int64, len(kept)) for v in zip(*((p.buffer, p.start) for p in kept), strict=True))
            if kept
            else (np.zeros(0, np.int64),) * 2
        )
        return cls(boxes, buffer, start, strides)

    def locate(self, pieces: Boxes, *, every: bool) -> tuple[Ints, "Layout"]:
        """The places of `pieces` in this rank's memory: row in `pieces`, and a layout of the same length.

        With `every`, all places of a piece (tied weights may be stored twice), else one. Raises ValueError if a
        piece overlaps a box without being inside it.
        """
        rows, others = overlaps(pieces, self.boxes)
        if not every:
            new = np.ones(len(rows), bool)
            new[1:] = rows[1:] != rows[:-1]
            rows, others = rows[new], others[new]
        found = pieces.take(rows)
        inside = ((self.boxes.offset[others] <= found.offset) & (found.end <= self.boxes.end[others])).all()
        if not inside:
            raise ValueError("a piece of the plan crosses the edge of a box of the layout.")
        moved = ((found.offset - self.boxes.offset[others]) * self.strides[others]).sum(axis=1)
        return rows, Layout(found, self.buffer[others], self.start[others] + moved, self.strides[others])


def most_dims(manifest: Manifest) -> int:
    """Number of dimensions of the tensor that has most; at least 1."""
    return max([1, *(len(t.shape) for t in manifest.tensors)])


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
