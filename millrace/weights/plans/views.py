"""Strided views of row-major tensors: as boxes of those tensors, and how many elements of a storage they cover, each
counted once. Torch-free."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.weights.plans.layout import row_major_strides

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A view of a storage: offset, shape and strides, in elements."""


@dataclass(frozen=True)
class ViewedBox:
    """A box of a tensor that a view shows."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    along: tuple[int | None, ...]
    """For each dimension of the tensor, the dimension of the view that runs along it; None if the extent is 1."""


def viewed_box(shape: Sequence[int], view: Strided) -> ViewedBox | None:
    """The box of a contiguous tensor of `shape` that a view of it shows. None if the view is not a box: it repeats
    or skips elements, or crosses the edge of a dimension."""
    start, extents, steps = view
    strides = row_major_strides(shape)
    offset = []
    for size, stride in zip(shape, strides, strict=True):
        offset.append(start // stride % size if size else 0)
    extent = [1] * len(shape)
    along: list[int | None] = [None] * len(shape)
    for dim, (length, step) in enumerate(zip(extents, steps, strict=True)):
        if length == 1:
            continue
        fits = [d for d, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and stride == step]
        if not fits or along[fits[0]] is not None or offset[fits[0]] + length > shape[fits[0]]:
            return None
        extent[fits[0]], along[fits[0]] = length, dim
    return ViewedBox(tuple(offset), tuple(extent), tuple(along))


def split_merged_dims(shape: Sequence[int], view: Strided, other: Strided) -> tuple[Strided, Strided]:
    """Splits the dimensions of `view` that run over several dimensions of a tensor of `shape`; `other`, a view of the
    same shape, is split in the same way."""
    strides = row_major_strides(shape)
    size_at = {stride: size for size, stride in zip(shape, strides, strict=True) if size > 1}
    dims: list[tuple[int, int, int]] = []
    for length, step, other_step in zip(view[1], view[2], other[2], strict=True):
        split: list[tuple[int, int, int]] = []
        while (size := size_at.get(step, length)) < length and length % size == 0:
            split.insert(0, (size, step, other_step))
            length, step, other_step = length // size, step * size, other_step * size
        dims += [(length, step, other_step), *split]
    extents = tuple(d[0] for d in dims)
    return (view[0], extents, tuple(d[1] for d in dims)), (other[0], extents, tuple(d[2] for d in dims))


@dataclass(frozen=True, order=True)
class _Runs:
    """A view as equally long runs of contiguous elements. Views of the same elements give equal objects."""

    start: int
    run: int
    repeated: tuple[tuple[int, int], ...]
    """(stride, extent), the smallest stride first."""

    @property
    def numel(self) -> int:
        return self.run * math.prod(extent for _, extent in self.repeated)

    @property
    def end(self) -> int:
        return self.start + self.run + sum(stride * (extent - 1) for stride, extent in self.repeated)


def covered_elements(views: Iterable[Strided]) -> int:
    """Number of elements that are in at least one of the views."""
    together: list[_Runs] = []
    total = end = 0
    for runs in sorted({_runs(view) for view in views if all(view[1])}):
        if runs.start >= end:
            total, together = total + _distinct(together), []
        together.append(runs)
        end = max(end, runs.end)
    return total + _distinct(together)


def _runs(view: Strided) -> _Runs:
    start, extents, strides = view
    repeated: list[tuple[int, int]] = []
    run = 1
    for stride, extent in sorted((s, e) for s, e in zip(strides, extents, strict=True) if e > 1 and s):
        if stride == run and not repeated:
            run *= extent
        else:
            repeated.append((stride, extent))
    return _Runs(start, run, tuple(repeated))


def _distinct(together: list[_Runs]) -> int:
    """Number of distinct elements in views whose ranges overlap."""
    if len(together) < 2:
        return sum(runs.numel for runs in together)
    base, end = together[0].start, max(runs.end for runs in together)
    # No run begins or ends inside a unit of this many elements.
    unit = math.gcd(*(n for r in together for n in (r.start - base, r.run, *(stride for stride, _ in r.repeated))))
    held = np.zeros((end - base) // unit, bool)
    for runs in together:
        shape = (*(extent for _, extent in runs.repeated), runs.run // unit)
        strides = (*(stride // unit for stride, _ in runs.repeated), 1)
        np.lib.stride_tricks.as_strided(held[(runs.start - base) // unit :], shape, strides)[...] = True
    return int(held.sum()) * unit
