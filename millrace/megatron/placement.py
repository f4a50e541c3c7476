"""How one parameter on one rank is composed of boxes of Hugging Face tensors.

Megatron fuses tensors (query, key and value head by head; gate and up), splits them over ranks and pads them. All of
this maps boxes to boxes, so one description is enough for reading and writing checkpoints and for both kinds of
publication. Torch-free.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model folder."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The box of `extent` at `source` in `tensor` is at `target` in the parameter."""

    tensor: Tensor
    source: tuple[int, ...]
    target: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A parameter of `shape`. Elements that no piece covers are padding."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, name: str, *shape: int) -> Self:
        """A parameter that is the whole tensor `name`."""
        zero = (0,) * len(shape)
        return cls(shape, (Piece(Tensor(name, shape), zero, zero, shape),))

    @classmethod
    def padding(cls, *shape: int) -> Self:
        """A parameter of padding only."""
        return cls(shape, ())

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """The part of `length` from `start` along `dim`."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        cut = (_cut(piece, dim, start, start + length) for piece in self.pieces)
        return replace(self, shape=shape, pieces=tuple(piece for piece in cut if piece is not None))

    def shard(self, dim: int, part: int, parts: int) -> Self:
        """One of `parts` equal parts along `dim`. Raises ValueError if they would not be equal."""
        length, rest = divmod(self.shape[dim], parts)
        if rest:
            raise ValueError(f"{self.shape[dim]} (dimension {dim} of {self.shape}) does not divide into {parts} parts.")
        return self.narrow(dim, part * length, length)


@dataclass(frozen=True)
class Share:
    """A box of a tensor inside a run of a flattened parameter: it begins `start` elements after the run's beginning and
    has `strides`."""

    tensor: Tensor
    source: tuple[int, ...]
    extent: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


def shares(placement: Placement, first: int, last: int) -> Iterator[Share]:
    """The boxes of tensors that are in the run [first, last) of the flattened parameter."""
    strides = tuple(math.prod(placement.shape[dim + 1 :]) for dim in range(len(placement.shape)))
    at = first
    while at < last:
        part, taken = _box(placement, strides, at, last)
        for piece in part.pieces:
            start = at - first + sum(t * s for t, s in zip(piece.target, strides, strict=True))
            yield Share(piece.tensor, piece.source, piece.extent, start, strides)
        at += taken


def _box(placement: Placement, strides: tuple[int, ...], at: int, last: int) -> tuple[Placement, int]:
    """The largest box that begins at the element `at` of the flattened parameter and ends before `last`, and its number
    of elements: whole rows, or as much of one as there is."""
    inside = at
    for dim, stride in enumerate(strides):
        index, inside = divmod(inside, stride)
        if not inside and last - at >= stride:
            count = min((last - at) // stride, placement.shape[dim] - index)
            return placement.narrow(dim, index, count), count * stride
        placement = placement.narrow(dim, index, 1)
    raise ValueError(f"{at} is not inside the parameter.")


def stack(placements: Iterable[Placement]) -> Placement:
    """The placements concatenated along dimension 0."""
    rows = 0
    width: tuple[int, ...] = ()
    pieces: list[Piece] = []
    for placement in placements:
        pieces += [replace(p, target=(p.target[0] + rows, *p.target[1:])) for p in placement.pieces]
        rows, width = rows + placement.shape[0], placement.shape[1:]
    return Placement((rows, *width), tuple(pieces))


def _cut(piece: Piece, dim: int, start: int, stop: int) -> Piece | None:
    """The part of the piece in [start, stop) along `dim`, with its target relative to `start`; None if there is
    none."""
    first = max(piece.target[dim], start)
    last = min(piece.target[dim] + piece.extent[dim], stop)
    if first >= last:
        return None

    def at(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return Piece(
        piece.tensor,
        source=at(piece.source, piece.source[dim] + first - piece.target[dim]),
        target=at(piece.target, first - start),
        extent=at(piece.extent, last - first),
    )
