"""The pieces of a plan: every box that a receiver wants, cut where other senders hold it, and to parts of messages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes, Ints, disjoint, distinct, intersections, overlaps, sums
from millrace.weights.plans.manifest import ITEM_BYTES, Manifest

ALIGNED = 16
"""Pieces begin in a message at multiples of this many bytes, for vector loads."""


@dataclass(frozen=True)
class WantedPieces:
    """Every piece that a receiver wants, once for each different layout."""

    pieces: Boxes
    bytes: Ints
    """[P] size of each piece, rounded up to ALIGNED."""
    span: list[slice]
    """The rows of `pieces` that belong to each different layout."""
    targets: list[list[int]]
    """The ranks that have each different layout."""
    holder_set: Ints
    """[P] index in `holders`."""
    holders: list[Ints]
    """Sets of sending ranks that hold the same pieces."""

    @classmethod
    def of(cls, manifest: Manifest, senders: Sequence[Boxes], receivers: Sequence[Boxes], grain: int) -> "WantedPieces":
        cells = disjoint(distinct(Boxes.joined(senders))[0])
        set_of_cell, holders = _holder_sets(cells, senders)
        alike: dict[bytes, list[int]] = {}
        for i, boxes in enumerate(receivers):
            alike.setdefault(boxes.hash, []).append(i)
        item = np.array([ITEM_BYTES[t.dtype] for t in manifest.tensors], np.int64)
        parts, sets = [], []
        for same in alike.values():
            wants = disjoint(distinct(receivers[same[0]])[0])
            rows, others = overlaps(wants, cells)
            pieces = intersections(wants, rows, cells, others)
            _check_whole(manifest, wants, rows, pieces)
            cut, origin = _cut(pieces, item, grain)
            order = np.lexsort(np.concatenate([cut.tensor[:, None], cut.offset], axis=1).T[::-1])
            parts.append(cut.take(order))
            sets.append(set_of_cell[others[origin]][order])
        ends = np.cumsum([len(part) for part in parts])
        pieces = Boxes.joined(parts) if parts else cells.take(np.zeros(0, np.int64))
        sizes = -(-pieces.numel * item[pieces.tensor] // ALIGNED) * ALIGNED
        return cls(
            pieces,
            sizes,
            [slice(int(end) - len(part), int(end)) for end, part in zip(ends, parts, strict=True)],
            [[len(senders) + i for i in same] for same in alike.values()],
            np.concatenate(sets) if sets else np.zeros(0, np.int64),
            holders,
        )


def _holder_sets(cells: Boxes, senders: Sequence[Boxes]) -> tuple[Ints, list[Ints]]:
    """For each cell the index of the set of ranks that hold it, and the sets."""
    rank = np.repeat(np.arange(len(senders)), [len(boxes) for boxes in senders])
    rows, others = overlaps(cells, Boxes.joined(senders))
    pairs = np.unique(np.stack([rows, rank[others]], axis=1), axis=0) if len(rows) else np.zeros((0, 2), np.int64)
    sums = np.zeros(len(cells), np.uint64)
    np.add.at(sums, pairs[:, 0], _hashed(pairs[:, 1]))
    _, example, index = np.unique(sums, return_index=True, return_inverse=True)
    begin = np.searchsorted(pairs[:, 0], example)
    end = np.searchsorted(pairs[:, 0], example, side="right")
    return index.astype(np.int64), [pairs[a:b, 1] for a, b in zip(begin, end, strict=True)]


def _hashed(ranks: Ints) -> NDArray[np.uint64]:
    """A 64-bit hash of each rank (splitmix64): the sum of the hashes identifies a set of ranks."""
    x = (ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _check_whole(manifest: Manifest, wants: Boxes, rows: Ints, pieces: Boxes) -> None:
    """Raises PublicationFailed if `pieces`, parts of `wants[rows]`, do not cover all of `wants`."""
    found = sums(rows, pieces.numel, len(wants))
    if missing := np.unique(wants.tensor[found < wants.numel]).tolist():
        names = ", ".join(manifest.tensors[i].name for i in missing[:5])
        what = f"no trainer rank holds some of what a replica wants of {len(missing)} tensors: {names}."
        raise PublicationFailed(what, "see that trainer and engine load the same model folder.")


def _cut(pieces: Boxes, item: Ints, grain: int) -> tuple[Boxes, Ints]:
    """Cuts pieces of more than `grain` bytes along their first dimension with an extent above 1. Returns the parts, and
    for each part the row of the piece that it was cut from."""
    dim = (pieces.extent > 1).argmax(axis=1)
    rows = np.arange(len(pieces))
    length = pieces.extent[rows, dim]
    parts = np.minimum(length, np.maximum(1, -(-pieces.numel * item[pieces.tensor] // grain)))
    origin = np.repeat(rows, parts)
    number = np.arange(len(origin)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = number * length[origin] // parts[origin]
    end = (number + 1) * length[origin] // parts[origin]
    offset, extent = pieces.offset[origin], pieces.extent[origin]
    cut = (np.arange(len(origin)), dim[origin])
    offset[cut] += begin
    extent[cut] = end - begin
    return Boxes(pieces.tensor[origin], offset, extent), origin
