"""A rank's layout: the boxes of manifest tensors that it holds or wants, and where each lies in its memory. Torch-free.

Only the boxes are told to others. Where they lie is each rank's own business: buffer, start and strides in elements.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from millrace.weights.plans.boxes import Boxes, Ints, overlaps
from millrace.weights.plans.manifest import Manifest


@dataclass(frozen=True)
class Place:
    """The box of `extent` at `offset` of manifest tensor `tensor` lies in buffer `buffer` from element `start` on, in
    `strides` (elements), one for each dimension of the tensor."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    buffer: int
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    boxes: Boxes
    buffer: Ints
    """[N] index of the rank's buffer that the box lies in."""
    start: Ints
    """[N] elements from the buffer's first."""
    strides: Ints
    """[N, D] elements; 0 for dimensions that the tensor does not have."""

    @classmethod
    def of(cls, places: Iterable[Place], manifest: Manifest) -> Self:
        """Empty boxes are left out."""
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
        """Where pieces of this rank's boxes lie: which piece, and its place. With `every`, everywhere that a piece
        belongs (tied weights may lie twice); else once. A piece lies inside each box that it touches."""
        rows, others = overlaps(pieces, self.boxes)
        if not every:
            new = np.ones(len(rows), bool)
            new[1:] = rows[1:] != rows[:-1]
            rows, others = rows[new], others[new]
        found = pieces.take(rows)
        inside = ((self.boxes.offset[others] <= found.offset) & (found.end <= self.boxes.end[others])).all()
        if not inside:
            raise ValueError("a piece of the plan lies across the edge of a box of the layout.")
        moved = ((found.offset - self.boxes.offset[others]) * self.strides[others]).sum(axis=1)
        return rows, Layout(found, self.buffer[others], self.start[others] + moved, self.strides[others])


def most_dims(manifest: Manifest) -> int:
    """Dimensions of the tensor that has most of them; at least 1."""
    return max([1, *(len(t.shape) for t in manifest.tensors)])


def whole_layout(manifest: Manifest) -> Layout:
    """A rank that has every tensor whole, each in a buffer of its own, contiguous."""
    return Layout.of(
        (
            Place(i, (0,) * len(t.shape), t.shape, i, 0, row_major_strides(t.shape))
            for i, t in enumerate(manifest.tensors)
        ),
        manifest,
    )


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
