"""Many boxes of manifest tensors as columns, and what plans compute from them: distinct boxes, overlaps, and disjoint
boxes. NumPy only; each needs a few passes over the columns, whatever the number of boxes.
"""

import hashlib
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LARGEST_LAYOUT_BYTES = 1 << 29
"""Bytes of the layout of one rank, uncompressed: four million boxes of matrices have 168 MB."""

ROWS = 1 << 14
"""Boxes that are encoded at a time: few enough for a processor's cache."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """N boxes in D dimensions. A dimension that a tensor does not have is offset 0 and extent 1."""

    tensor: Ints
    """[N] index of the tensor in the manifest."""
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
        return np.asarray(self.extent.prod(axis=1), np.int64)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Sequence[int] | Ints, Sequence[int] | Ints]], dims: int) -> Self:
        """Boxes from (tensor, offset, extent) with at most `dims` dimensions each; empty boxes are left out."""
        kept = [(t, o, e) for t, o, e in rows if all(e)]
        tensor = np.fromiter((t for t, _, _ in kept), np.int64, len(kept))
        offset, extent = np.zeros((len(kept), dims), np.int64), np.ones((len(kept), dims), np.int64)
        for i, (_, o, e) in enumerate(kept):
            offset[i, : len(o)], extent[i, : len(e)] = o, e
        return cls(tensor, offset, extent)

    @classmethod
    def from_columns(cls, columns: Ints) -> Self:
        """The reverse of `columns`, whose memory the boxes share."""
        dims = columns.shape[1] // 2
        return cls(columns[:, 0], columns[:, 1 : 1 + dims], columns[:, 1 + dims :])

    @classmethod
    def joined(cls, many: Sequence["Boxes"]) -> Self:
        """All boxes of `many`, in order."""
        return cls(*(np.concatenate([getattr(b, name) for b in many]) for name in ("tensor", "offset", "extent")))

    def take(self, rows: NDArray[np.generic]) -> "Boxes":
        """The boxes of these rows, or of this mask."""
        return Boxes(self.tensor[rows], self.offset[rows], self.extent[rows])

    @property
    def columns(self) -> Ints:
        """[N, 1 + 2 D]: tensor, offset, extent."""
        return self.columns_of(slice(None))

    def columns_of(self, rows: slice) -> Ints:
        """`columns` of some rows."""
        return np.concatenate([self.tensor[rows, None], self.offset[rows], self.extent[rows]], axis=1)

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256()
        for rows in self.encoded_rows():
            digest.update(rows)
        return digest.digest()

    def encoded_rows(self) -> Iterator[bytes]:
        """`columns` as little-endian int64, a number of rows at a time."""
        for start in range(0, len(self), ROWS):
            yield _bytes(self.columns_of(slice(start, start + ROWS)))

    def encode(self) -> bytes:
        """The boxes as bytes for the wire: differences between rows as little-endian int64, compressed."""
        steps = np.diff(self.columns, axis=0, prepend=0)
        return self.dims.to_bytes(1, "little") + zlib.compress(_bytes(steps.T), 1)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reverse of `encode`. Raises ValueError for bytes that `encode` did not write."""
        if not data:
            raise ValueError("a layout has no bytes.")
        dims = data[0]
        try:
            reader = zlib.decompressobj()
            flat = np.frombuffer(reader.decompress(data[1:], LARGEST_LAYOUT_BYTES), "<i8")
        except zlib.error as error:
            raise ValueError(f"a layout's bytes are damaged: {error}.") from error
        if not reader.eof:
            raise ValueError(f"a layout ends too soon, or has more than {LARGEST_LAYOUT_BYTES} bytes.")
        return cls.from_columns(np.ascontiguousarray(flat.reshape(1 + 2 * dims, -1).cumsum(axis=1).T))


def distinct(boxes: Boxes) -> tuple[Boxes, Ints]:
    """Each different box once, ordered by tensor and offset; and for each row of `boxes` its index among them."""
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
    """Pairs of rows of `left` and `right` that have an element in common, as two columns, ordered by left row.

    A sweep along the first dimension: with `right` sorted by beginning, the candidates for a box of `left` are those
    from the first that ends after its beginning to the last that begins before its end.
    """
    if not len(left) or not len(right):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    span = int(max(left.end[:, 0].max(), right.end[:, 0].max())) + 1
    begins = right.tensor * span + right.offset[:, 0]
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    # The largest end so far never decreases, so it can be searched. Tensors are `span` apart and do not touch.
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


def intersections(left: Boxes, rows: Ints, right: Boxes, others: Ints) -> Boxes:
    """The intersection of each pair of overlapping boxes."""
    offset = np.maximum(left.offset[rows], right.offset[others])
    end = np.minimum(left.end[rows], right.end[others])
    return Boxes(left.tensor[rows], offset, end - offset)


def disjoint(boxes: Boxes) -> Boxes:
    """Boxes that do not overlap and cover the same elements as `boxes`, which are distinct. A box that overlaps no
    other stays whole."""
    rows, others = overlaps(boxes, boxes)
    overlapping = np.unique(boxes.tensor[rows[rows != others]])
    if not len(overlapping):
        return boxes
    split = np.isin(boxes.tensor, overlapping)
    cells = [_cells(boxes.take(np.flatnonzero(boxes.tensor == tensor))) for tensor in overlapping]
    return distinct(Boxes.joined([boxes.take(np.flatnonzero(~split)), *cells]))[0]


def _cells(boxes: Boxes) -> Boxes:
    """The cells of one tensor: the grid of all boxes' edges, as far as a box covers it."""
    edges = [np.unique(np.concatenate([boxes.offset[:, d], boxes.end[:, d]])) for d in range(boxes.dims)]
    found = []
    for corner in itertools.product(*(range(len(e) - 1) for e in edges)):
        low = np.array([e[i] for e, i in zip(edges, corner, strict=True)])
        high = np.array([e[i + 1] for e, i in zip(edges, corner, strict=True)])
        if ((boxes.offset <= low) & (high <= boxes.end)).all(axis=1).any():
            found.append((int(boxes.tensor[0]), low, high - low))
    return Boxes.of(found, boxes.dims)


def sums(index: Ints, values: Ints, length: int = 0) -> Ints:
    """[max(length, max(index) + 1)] the sum of the values of each index."""
    return np.rint(np.bincount(index, weights=values, minlength=length)).astype(np.int64)


def _ranges(first: Ints, counts: Ints) -> Ints:
    """counts[0] numbers from first[0] on, then counts[1] numbers from first[1] on, …"""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts - first, counts)


def _bytes(columns: Ints) -> bytes:
    return np.ascontiguousarray(columns, "<i8").tobytes()
