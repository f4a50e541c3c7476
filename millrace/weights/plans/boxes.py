"""Many boxes of manifest tensors as columns, and the three things that plans need of them: which boxes are the same,
which overlap, and how to cut overlapping ones apart. NumPy only, a few passes over the columns whatever their number.
"""

import hashlib
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """N boxes. Dimensions that a tensor does not have are written as offset 0 and extent 1."""

    tensor: Ints
    """[N] index in the manifest."""
    offset: Ints
    """[N, D]"""
    extent: Ints
    """[N, D], at least 1."""

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dims(self) -> int:
        return int(self.offset.shape[1])

    @property
    def end(self) -> Ints:
        return self.offset + self.extent

    @property
    def numel(self) -> Ints:
        """[N] elements."""
        return self.extent.prod(axis=1)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Sequence[int] | Ints, Sequence[int] | Ints]], dims: int) -> Self:
        """From (tensor, offset, extent) of at most `dims` dimensions each; empty boxes are left out."""
        kept = [(t, o, e) for t, o, e in rows if all(e)]
        tensor = np.fromiter((t for t, _, _ in kept), np.int64, len(kept))
        offset, extent = np.zeros((len(kept), dims), np.int64), np.ones((len(kept), dims), np.int64)
        for i, (_, o, e) in enumerate(kept):
            offset[i, : len(o)], extent[i, : len(e)] = o, e
        return cls(tensor, offset, extent)

    @classmethod
    def joined(cls, many: Sequence["Boxes"]) -> Self:
        return cls(*(np.concatenate([getattr(b, name) for b in many]) for name in ("tensor", "offset", "extent")))

    def take(self, rows: NDArray[np.generic]) -> "Boxes":
        return Boxes(self.tensor[rows], self.offset[rows], self.extent[rows])

    @property
    def columns(self) -> Ints:
        """[N, 1 + 2 D]: everything that makes a box what it is."""
        return np.concatenate([self.tensor[:, None], self.offset, self.extent], axis=1)

    @cached_property
    def hash(self) -> bytes:
        return hashlib.sha256(_bytes(self.columns)).digest()

    def encode(self) -> bytes:
        """For the wire: the columns as little-endian int64, row after row differenced, compressed."""
        steps = np.diff(self.columns, axis=0, prepend=0)
        return self.dims.to_bytes(1, "little") + zlib.compress(_bytes(steps.T), 1)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ValueError for bytes that no `encode` wrote."""
        if not data:
            raise ValueError("a layout has no bytes.")
        dims = data[0]
        try:
            flat = np.frombuffer(zlib.decompress(data[1:]), "<i8")
        except zlib.error as error:
            raise ValueError(f"a layout's bytes are damaged: {error}.") from error
        columns = flat.reshape(1 + 2 * dims, -1).cumsum(axis=1).T
        offset, extent = columns[:, 1 : 1 + dims], columns[:, 1 + dims :]
        return cls(columns[:, 0].copy(), np.ascontiguousarray(offset), np.ascontiguousarray(extent))


def distinct(boxes: Boxes) -> tuple[Boxes, Ints]:
    """Each box once, in order of tensor and offset; and for each row of `boxes` which of them it is."""
    if not len(boxes):
        return boxes, np.zeros(0, np.int64)
    columns = boxes.columns
    order = np.lexsort(columns.T[::-1])
    ordered = columns[order]
    new = np.ones(len(boxes), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(boxes), np.int64)
    which[order] = np.cumsum(new) - 1
    return boxes.take(order[new]), which


def overlaps(left: Boxes, right: Boxes) -> tuple[Ints, Ints]:
    """Rows of `left` and of `right` that have an element in common, as two columns, ordered by left row.

    A sweep along the first dimension: candidates for a box of `left` are the boxes of `right`, sorted by where they
    begin, from the first that ends behind its beginning to the last that begins before its end.
    """
    if not len(left) or not len(right):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    span = int(max(left.end[:, 0].max(), right.end[:, 0].max())) + 1
    begins = right.tensor * span + right.offset[:, 0]
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    # The furthest end so far never falls, so it can be searched; tensors lie `span` apart and do not touch.
    ends = np.maximum.accumulate((right.tensor * span + right.end[:, 0])[order])
    first = np.searchsorted(ends, left.tensor * span + left.offset[:, 0], side="right")
    last = np.searchsorted(begins, left.tensor * span + left.end[:, 0], side="left")
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(left)), counts)
    candidates = order[_ranges(first, counts)]
    touching = left.tensor[rows] == right.tensor[candidates]
    for dim in range(left.dims):
        touching &= left.offset[rows, dim] < right.offset[candidates, dim] + right.extent[candidates, dim]
        touching &= right.offset[candidates, dim] < left.offset[rows, dim] + left.extent[rows, dim]
    return rows[touching], candidates[touching]


def common(left: Boxes, rows: Ints, right: Boxes, others: Ints) -> Boxes:
    """What each pair of overlapping boxes has in common."""
    offset = np.maximum(left.offset[rows], right.offset[others])
    end = np.minimum(left.end[rows], right.end[others])
    return Boxes(left.tensor[rows], offset, end - offset)


def disjoint(boxes: Boxes) -> Boxes:
    """Boxes that do not overlap and cover what `boxes` (distinct) cover; those that overlap nothing stay whole."""
    rows, others = overlaps(boxes, boxes)
    clashing = np.unique(boxes.tensor[rows[rows != others]])
    if not len(clashing):
        return boxes
    torn = np.isin(boxes.tensor, clashing)
    cells = [_cells(boxes.take(np.flatnonzero(boxes.tensor == tensor))) for tensor in clashing]
    return distinct(Boxes.joined([boxes.take(np.flatnonzero(~torn)), *cells]))[0]


def _cells(boxes: Boxes) -> Boxes:
    """Of one tensor: the grid that all edges make, where any box covers it."""
    edges = [np.unique(np.concatenate([boxes.offset[:, d], boxes.end[:, d]])) for d in range(boxes.dims)]
    found = []
    for corner in itertools.product(*(range(len(e) - 1) for e in edges)):
        low = np.array([e[i] for e, i in zip(edges, corner, strict=True)])
        high = np.array([e[i + 1] for e, i in zip(edges, corner, strict=True)])
        if ((boxes.offset <= low) & (high <= boxes.end)).all(axis=1).any():
            found.append((int(boxes.tensor[0]), low, high - low))
    return Boxes.of(found, boxes.dims)


def _ranges(first: Ints, counts: Ints) -> Ints:
    """first[0], first[0] + 1, … counts[0] of them, then from first[1], …"""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts - first, counts)


def _bytes(columns: Ints) -> bytes:
    return np.ascontiguousarray(columns, "<i8").tobytes()
