"""The sharded plan: every receiver gets the boxes that it wants from ranks that hold them, and nothing is gathered.

Boxes of both sides are intersected once. Where several ranks hold the same box, each sends its part of what is wanted
of it. What goes from one rank to another is cut, in the manifest's order, into messages; messages are dealt to rounds
such that in each round nobody sends or receives more than a message's bound, all links work at once, and every
receiver is fed evenly. Replicas with the same layout pass messages on in a chain where the trainer's egress would be
the limit. Pure, torch-free, the same on every rank, and agreed upon by hash.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes, Ints, common, disjoint, distinct, overlaps
from millrace.weights.plans.manifest import ITEM_BYTES, Manifest

MESSAGE_BYTES = 128 << 20
"""What a rank sends, and what it receives, in one round: about so much, at most UNEVEN times that."""
UNEVEN = 2
ALIGNED = 16
"""Pieces begin in a message at multiples of this, for vector loads."""
GRAINS = 16
"""A piece is at most this part of a message, so that messages come out even."""
LEAST = 32
"""Two ranks exchange no less than this part of a message at once, if they have as much for each other."""
ATTEMPTS = 8
PHASES = 1 << 16


@dataclass(frozen=True)
class Step:
    """What one rank does in a round: contents and the ranks they go to or come from."""

    round: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    manifest_hash: bytes
    senders: int
    """Ranks 0 .. senders - 1 of the communicator hold the weights; the others want them."""
    world_size: int
    rounds: int
    pieces: Boxes
    """[P], content after content."""
    at: Ints
    """[P] bytes from the beginning of the content."""
    first: Ints
    """[C + 1] piece where each content begins; the last is P."""
    sizes: Ints
    """[C] bytes of each content on the wire."""
    hops: Ints
    """[M, 4] round, source, target, content; in this order."""

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256(self.manifest_hash)
        digest.update(repr((self.senders, self.world_size, self.rounds)).encode())
        for column in (self.pieces.columns, self.at, self.first, self.sizes, self.hops):
            digest.update(np.ascontiguousarray(column, "<i8").tobytes())
        return digest.digest()

    def steps(self, rank: int) -> list[Step]:
        """Of the rounds that `rank` takes part in, in order."""
        mine = self.hops[(self.hops[:, 1] == rank) | (self.hops[:, 2] == rank)]
        found = []
        for rows in np.split(mine, np.flatnonzero(np.diff(mine[:, 0])) + 1) if len(mine) else ():
            sends = tuple((int(c), int(t)) for _, s, t, c in rows if s == rank)
            receives = tuple((int(c), int(s)) for _, s, t, c in rows if t == rank)
            found.append(Step(int(rows[0, 0]), sends, receives))
        return found

    def contents_of(self, target: int) -> Ints:
        """Contents that a receiver gets, in the order in which they come."""
        return self.hops[self.hops[:, 2] == target, 3]

    def packed_by(self, rank: int) -> Ints:
        """Contents that a sender packs, each once."""
        return np.unique(self.hops[self.hops[:, 1] == rank, 3]) if rank < self.senders else np.zeros(0, np.int64)

    def pieces_in(self, content: int) -> slice:
        return slice(int(self.first[content]), int(self.first[content + 1]))

    def egress(self) -> Ints:
        """[world_size] bytes that each rank sends."""
        return _sums(self.hops[:, 1], self.sizes[self.hops[:, 3]], self.world_size)

    def ingress(self) -> Ints:
        return _sums(self.hops[:, 2], self.sizes[self.hops[:, 3]], self.world_size)


def plan(
    manifest: Manifest, senders: Sequence[Boxes], receivers: Sequence[Boxes], message_bytes: int = MESSAGE_BYTES
) -> ShardedPlan:
    """`senders` and `receivers` are what each rank holds or wants; senders come first in the communicator.

    Raises PublicationFailed where a receiver wants what no sender holds.
    """
    wanted = _Wanted.of(manifest, senders, receivers, max(ALIGNED, message_bytes // GRAINS))
    chains = [[target] for targets in wanted.targets for target in targets]
    flows = _Flows.of(wanted, chains, len(senders))
    sent, received = flows.loads()
    longest = round(int(sent.max()) / int(received.max())) if len(received) else 1
    if longest > 1:
        chains = [part for targets in wanted.targets for part in _chains(targets, longest)]
        flows = _Flows.of(wanted, chains, len(senders))
    return _dealt(manifest, wanted, flows, chains, len(senders), message_bytes)


def _chains(targets: list[int], longest: int) -> Iterator[list[int]]:
    """Of ranks with the same layout: who gets it from the trainer, and who passes it on to whom."""
    for start in range(0, len(targets), longest):
        yield targets[start : start + longest]


@dataclass(frozen=True)
class _Wanted:
    """Every piece that somebody wants, of each layout once."""

    pieces: Boxes
    bytes: Ints
    """[P] rounded up to ALIGNED."""
    span: list[slice]
    """Of `pieces`, for each different layout."""
    targets: list[list[int]]
    """Ranks that have this layout."""
    kind: Ints
    """[P] which set of holders has it."""
    holders: list[Ints]
    """Ranks, for each such set."""

    @classmethod
    def of(cls, manifest: Manifest, senders: Sequence[Boxes], receivers: Sequence[Boxes], grain: int) -> "_Wanted":
        cells = disjoint(distinct(Boxes.joined(senders))[0])
        kind_of_cell, holders = _kinds(cells, senders)
        alike: dict[bytes, list[int]] = {}
        for i, boxes in enumerate(receivers):
            alike.setdefault(boxes.hash, []).append(i)
        item = np.array([ITEM_BYTES[t.dtype] for t in manifest.tensors], np.int64)
        parts, kinds = [], []
        for same in alike.values():
            wants = disjoint(distinct(receivers[same[0]])[0])
            rows, others = overlaps(wants, cells)
            pieces = common(wants, rows, cells, others)
            _check_whole(manifest, wants, rows, pieces)
            cut, origin = _cut(pieces, item, grain)
            order = np.lexsort(np.concatenate([cut.tensor[:, None], cut.offset], axis=1).T[::-1])
            parts.append(cut.take(order))
            kinds.append(kind_of_cell[others[origin]][order])
        ends = np.cumsum([len(part) for part in parts])
        pieces = Boxes.joined(parts) if parts else cells.take(np.zeros(0, np.int64))
        sizes = -(-pieces.numel * item[pieces.tensor] // ALIGNED) * ALIGNED
        return cls(
            pieces,
            sizes,
            [slice(int(end) - len(part), int(end)) for end, part in zip(ends, parts, strict=True)],
            [[len(senders) + i for i in same] for same in alike.values()],
            np.concatenate(kinds) if kinds else np.zeros(0, np.int64),
            holders,
        )


def _kinds(cells: Boxes, senders: Sequence[Boxes]) -> tuple[Ints, list[Ints]]:
    """Which set of holders each cell has, and the sets."""
    rank = np.repeat(np.arange(len(senders)), [len(boxes) for boxes in senders])
    rows, others = overlaps(cells, Boxes.joined(senders))
    pairs = np.unique(np.stack([rows, rank[others]], axis=1), axis=0) if len(rows) else np.zeros((0, 2), np.int64)
    sums = np.zeros(len(cells), np.uint64)
    np.add.at(sums, pairs[:, 0], _mixed(pairs[:, 1]))
    _, example, kind = np.unique(sums, return_index=True, return_inverse=True)
    begin = np.searchsorted(pairs[:, 0], example)
    end = np.searchsorted(pairs[:, 0], example, side="right")
    return kind.astype(np.int64), [pairs[a:b, 1] for a, b in zip(begin, end, strict=True)]


def _mixed(ranks: Ints) -> NDArray[np.uint64]:
    """Numbers whose sums tell sets of ranks apart (splitmix64)."""
    x = (ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _check_whole(manifest: Manifest, wants: Boxes, rows: Ints, pieces: Boxes) -> None:
    found = _sums(rows, pieces.numel, len(wants))
    if missing := np.unique(wants.tensor[found < wants.numel]).tolist():
        names = ", ".join(manifest.tensors[i].name for i in missing[:5])
        what = f"no trainer rank holds some of what a replica wants of {len(missing)} tensors: {names}."
        raise PublicationFailed(what, "see that trainer and engine load the same model folder.")


def _cut(pieces: Boxes, item: Ints, grain: int) -> tuple[Boxes, Ints]:
    """Pieces of more than `grain` bytes cut along their first dimension that has an extent; and what each is cut of."""
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


@dataclass(frozen=True)
class _Flows:
    """Each piece on its way to each rank that gets it from the trainer."""

    piece: Ints
    source: Ints
    target: Ints
    bytes: Ints

    @classmethod
    def of(cls, wanted: _Wanted, chains: list[list[int]], senders: int) -> "_Flows":
        span_of = {rank: span for span, ranks in zip(wanted.span, wanted.targets, strict=True) for rank in ranks}
        heads = [chain[0] for chain in chains]
        counts = [span_of[head].stop - span_of[head].start for head in heads]
        piece = np.concatenate([np.arange(span_of[h].start, span_of[h].stop) for h in heads] or [np.zeros(0, np.int64)])
        target, size = np.repeat(np.array(heads, np.int64), counts), wanted.bytes[piece]
        return cls(piece, _sources(wanted, piece, target, size), target, size)

    def loads(self) -> tuple[Ints, Ints]:
        """Bytes by source and by target."""
        return _sums(self.source, self.bytes), _sums(self.target, self.bytes)


def _sources(wanted: _Wanted, piece: Ints, target: Ints, size: Ints) -> Ints:
    """Of each set of holders, each gives an even part of what each target wants of the set."""
    count = np.array([len(ranks) for ranks in wanted.holders], np.int64)
    begin = np.cumsum(count) - count
    flat = np.concatenate(wanted.holders) if wanted.holders else np.zeros(0, np.int64)
    kind = wanted.kind[piece]
    before, total = _running(target * len(count) + kind, size)
    part = (2 * before + size) * count[kind] // (2 * total)
    return flat[begin[kind] + (part + target) % count[kind]] if len(piece) else piece


def _dealt(
    manifest: Manifest, wanted: _Wanted, flows: _Flows, chains: list[list[int]], senders: int, message_bytes: int
) -> ShardedPlan:
    """Flows cut into messages, messages dealt to rounds, chains appended."""
    world = senders + sum(map(len, wanted.targets))
    before, total = _running(flows.source * world + flows.target, flows.bytes)
    rounds = max(1, -(-int(max(load.max(initial=0) for load in flows.loads())) // message_bytes))
    for _ in range(ATTEMPTS):
        dealt = _rounds(flows, before, total, rounds, max(1, message_bytes // LEAST))
        loads = (_sums(dealt * world + end, flows.bytes) for end in (flows.source, flows.target))
        heaviest = int(max(load.max(initial=0) for load in loads))
        if heaviest <= UNEVEN * message_bytes:
            break
        rounds = -(-rounds * heaviest // (UNEVEN * message_bytes))
    key = (dealt * world + flows.source) * world + flows.target
    order = np.argsort(key, kind="stable")  # a target's pieces lie in order already
    new = np.ones(len(order), bool)
    new[1:] = np.diff(key[order]) != 0
    first = np.append(np.flatnonzero(new), len(order))
    reach = np.append(0, np.cumsum(flows.bytes[order]))
    content = np.cumsum(new) - 1
    heads = order[new]
    ends = np.stack([dealt[heads], flows.source[heads], flows.target[heads]], axis=1)
    hops = np.concatenate([ends, np.arange(len(first) - 1)[:, None]], axis=1)
    hops = np.concatenate([hops, *_passed_on(hops, chains)])
    hops = hops[np.lexsort(hops.T[::-1])]
    return ShardedPlan(
        manifest.hash,
        senders,
        world,
        int(hops[:, 0].max(initial=-1)) + 1,
        wanted.pieces.take(flows.piece[order]),
        reach[:-1] - reach[first[content]] if len(order) else reach[:0],
        first,
        np.diff(reach[first]),
        hops,
    )


def _rounds(flows: _Flows, before: Ints, total: Ints, rounds: int, least: int) -> Ints:
    """Two ranks' messages lie evenly over the rounds; those of pairs with few, each pair's elsewhere."""
    count = np.clip(-(-total // least), 1, rounds)
    number = (2 * before + flows.bytes) * count // np.maximum(1, 2 * total)
    # Multiples of the golden ratio: the phases of any run of neighbours lie far apart.
    phase = (flows.source + flows.target) * 40503 % PHASES
    return (number * PHASES + phase) * rounds // (count * PHASES)


def _passed_on(hops: Ints, chains: list[list[int]]) -> Iterator[Ints]:
    for chain in chains:
        head = hops[hops[:, 2] == chain[0]] if len(chain) > 1 else hops[:0]
        for number, (source, target) in enumerate(itertools.pairwise(chain), 1):
            hop = head.copy()
            hop[:, 0] += number
            hop[:, 1], hop[:, 2] = source, target
            yield hop


def _running(group: Ints, values: Ints) -> tuple[Ints, Ints]:
    """For each row the sum of its group's rows before it, and of all of its group."""
    order = np.argsort(group, kind="stable")
    reach = np.cumsum(values[order]) - values[order]
    ordered = group[order]
    new = np.ones(len(order), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(new)
    which = np.cumsum(new) - 1
    before, total = np.empty_like(values), np.empty_like(values)
    sums = np.diff(np.append(reach[starts], values.sum()))
    before[order] = reach - reach[starts][which] if len(order) else reach
    total[order] = sums[which] if len(order) else reach
    return before, total


def _sums(index: Ints, values: Ints, length: int = 0) -> Ints:
    return np.rint(np.bincount(index, weights=values, minlength=length)).astype(np.int64)
