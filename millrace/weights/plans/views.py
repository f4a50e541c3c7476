"""Strided views of row-major tensors as boxes of them. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.weights.plans.layout import row_major_strides

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A view of a storage: offset, shape and strides, in elements."""


@dataclass(frozen=True)
class ViewedBox:
    """A box of a tensor, and along which of the view's dimensions each of its own runs (None: it has extent 1)."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    along: tuple[int | None, ...]


def viewed_box(shape: Sequence[int], view: Strided) -> ViewedBox | None:
    """Which box of a contiguous tensor of `shape` a view of it shows. None where it shows no box: elements repeated,
    skipped, or taken across the edge of a dimension."""
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
    """A view whose dimensions run over several of the tensor's is given one for each; `other`, of the same shape, is
    split in the same way."""
    strides = row_major_strides(shape)
    size_at = {stride: size for size, stride in zip(shape, strides, strict=True) if size > 1}
    dims: list[tuple[int, int, int]] = []
    for length, step, others in zip(view[1], view[2], other[2], strict=True):
        split: list[tuple[int, int, int]] = []
        while (size := size_at.get(step, length)) < length and length % size == 0:
            split.insert(0, (size, step, others))
            length, step, others = length // size, step * size, others * size
        dims += [(length, step, others), *split]
    extents = tuple(d[0] for d in dims)
    return (view[0], extents, tuple(d[1] for d in dims)), (other[0], extents, tuple(d[2] for d in dims))
