"""The sharded plan: every receiver gets the boxes that it wants from ranks that hold them, and nothing is gathered.

1. The senders' boxes are cut until none overlap, and intersected with the boxes that receivers want: the pieces.
2. Where several ranks hold a piece's box, they share the sending.
3. The pieces that one rank sends to another are cut, in the manifest's order, into contents: the bytes of one message.
4. Contents are dealt to rounds, so that in a round no rank sends or receives more than about MESSAGE_BYTES, all links
   work at once, and all receivers get bytes evenly.
5. Replicas with the same layout pass contents on in a chain where the trainer could not send fast enough to all. So one
   content may travel in several messages: its hops.

Pure and torch-free. Every rank computes the same plan, and its hash is compared before anything is sent.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes, Ints, disjoint, distinct, intersections, overlaps
from millrace.weights.plans.manifest import ITEM_BYTES, Manifest

MESSAGE_BYTES = 128 << 20
"""Bytes that a rank sends, and that it receives, in one round: about this, at most UNEVEN times this."""
UNEVEN = 2
ALIGNED = 16
"""Pieces begin in a message at multiples of this many bytes, for vector loads."""
GRAINS = 16
"""A piece is at most 1/GRAINS of a message, so that messages have about equal sizes."""
LEAST = 32
"""What two ranks have for each other is cut into parts of at least 1/LEAST of a message."""
ATTEMPTS = 8
"""How often the number of rounds is raised until no round is too large."""
PHASES = 1 << 16
"""Steps into which `_round_of_flows` divides a round to spread the pairs of ranks over the rounds."""


@dataclass(frozen=True)
class Step:
    """What one rank does in a round."""

    round: int
    sends: tuple[tuple[int, int], ...]
    """(content, rank that it goes to)."""
    receives: tuple[tuple[int, int], ...]
    """(content, rank that it comes from)."""


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """P pieces in C contents, which travel in M messages (hops)."""

    manifest_hash: bytes
    senders: int
    """Ranks 0 .. senders - 1 of the communicator hold the weights; the others receive them."""
    world_size: int
    rounds: int
    pieces: Boxes
    """[P] boxes, ordered by content."""
    at: Ints
    """[P] where each piece begins in its content, in bytes."""
    first: Ints
    """[C + 1] the first piece of each content; the last entry is P."""
    sizes: Ints
    """[C] size of each content in bytes."""
    hops: Ints
    """[M, 4] round, source rank, target rank, content; sorted by these columns."""

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256(self.manifest_hash)
        digest.update(repr((self.senders, self.world_size, self.rounds)).encode())
        for column in (self.pieces.columns, self.at, self.first, self.sizes, self.hops):
            digest.update(np.ascontiguousarray(column, "<i8").tobytes())
        return digest.digest()

    def steps(self, rank: int) -> list[Step]:
        """The rounds in which `rank` takes part, in order."""
        mine = self.hops[(self.hops[:, 1] == rank) | (self.hops[:, 2] == rank)]
        found = []
        for rows in np.split(mine, np.flatnonzero(np.diff(mine[:, 0])) + 1) if len(mine) else ():
            sends = tuple((int(c), int(t)) for _, s, t, c in rows if s == rank)
            receives = tuple((int(c), int(s)) for _, s, t, c in rows if t == rank)
            found.append(Step(int(rows[0, 0]), sends, receives))
        return found

    def contents_of(self, target: int) -> Ints:
        """Contents that a receiver gets, in the order in which they arrive."""
        contents: Ints = self.hops[self.hops[:, 2] == target, 3]
        return contents

    def packed_by(self, rank: int) -> Ints:
        """Contents that a sender packs, each once; none for a receiver, which only passes contents on."""
        return np.unique(self.hops[self.hops[:, 1] == rank, 3]) if rank < self.senders else np.zeros(0, np.int64)

    def pieces_in(self, content: int) -> slice:
        """The rows of `pieces` and `at` that belong to a content."""
        return slice(int(self.first[content]), int(self.first[content + 1]))

    def egress(self) -> Ints:
        """[world_size] bytes that each rank sends."""
        return _sums(self.hops[:, 1], self.sizes[self.hops[:, 3]], self.world_size)

    def ingress(self) -> Ints:
        """[world_size] bytes that each rank receives."""
        return _sums(self.hops[:, 2], self.sizes[self.hops[:, 3]], self.world_size)


def plan(
    manifest: Manifest, senders: Sequence[Boxes], receivers: Sequence[Boxes], message_bytes: int = MESSAGE_BYTES
) -> ShardedPlan:
    """`senders` and `receivers`: the boxes that each rank holds or wants, by rank; senders come first in the
    communicator.

    Raises PublicationFailed where a receiver wants something that no sender holds.
    """
    wanted = _WantedPieces.of(manifest, senders, receivers, max(ALIGNED, message_bytes // GRAINS))
    chains = [[target] for targets in wanted.targets for target in targets]
    flows = _Flows.of(wanted, chains)
    sent, received = flows.loads()
    longest = round(int(sent.max()) / int(received.max())) if len(received) else 1
    if longest > 1:
        chains = [part for targets in wanted.targets for part in _chains(targets, longest)]
        flows = _Flows.of(wanted, chains)
    return _plan_of_flows(manifest, wanted, flows, chains, len(senders), message_bytes)


def _chains(targets: list[int], longest: int) -> Iterator[list[int]]:
    """Chains of at most `longest` ranks of one layout: the first gets its contents from the senders, each passes them
    on to the next."""
    for start in range(0, len(targets), longest):
        yield targets[start : start + longest]


@dataclass(frozen=True)
class _WantedPieces:
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
    def of(
        cls, manifest: Manifest, senders: Sequence[Boxes], receivers: Sequence[Boxes], grain: int
    ) -> "_WantedPieces":
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
    """Raises PublicationFailed where `pieces`, parts of `wants[rows]`, do not cover all of `wants`."""
    found = _sums(rows, pieces.numel, len(wants))
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


@dataclass(frozen=True)
class _Flows:
    """F flows: each piece to each rank that gets it from a sender, which is the first rank of a chain."""

    piece: Ints
    """[F] row in `_WantedPieces.pieces`."""
    source: Ints
    target: Ints
    bytes: Ints

    @classmethod
    def of(cls, wanted: _WantedPieces, chains: list[list[int]]) -> "_Flows":
        span_of = {rank: span for span, ranks in zip(wanted.span, wanted.targets, strict=True) for rank in ranks}
        heads = [chain[0] for chain in chains]
        counts = [span_of[head].stop - span_of[head].start for head in heads]
        piece = np.concatenate([np.arange(span_of[h].start, span_of[h].stop) for h in heads] or [np.zeros(0, np.int64)])
        target, size = np.repeat(np.array(heads, np.int64), counts), wanted.bytes[piece]
        return cls(piece, _sources(wanted, piece, target, size), target, size)

    def loads(self) -> tuple[Ints, Ints]:
        """Bytes by source rank, and by target rank."""
        return _sums(self.source, self.bytes), _sums(self.target, self.bytes)


def _sources(wanted: _WantedPieces, piece: Ints, target: Ints, size: Ints) -> Ints:
    """The rank that sends each flow: the ranks of a holder set share evenly what each target wants from the set."""
    count = np.array([len(ranks) for ranks in wanted.holders], np.int64)
    begin = np.cumsum(count) - count
    flat = np.concatenate(wanted.holders) if wanted.holders else np.zeros(0, np.int64)
    of_set = wanted.holder_set[piece]
    before, total = _running_sums(target * len(count) + of_set, size)
    part = (2 * before + size) * count[of_set] // (2 * total)
    return flat[begin[of_set] + (part + target) % count[of_set]] if len(piece) else piece


def _plan_of_flows(
    manifest: Manifest, wanted: _WantedPieces, flows: _Flows, chains: list[list[int]], senders: int, message_bytes: int
) -> ShardedPlan:
    """Deals the flows to rounds, joins those of one round, source and target to contents, and adds the chains' hops."""
    world = senders + sum(map(len, wanted.targets))
    before, total = _running_sums(flows.source * world + flows.target, flows.bytes)
    rounds = max(1, -(-int(max(load.max(initial=0) for load in flows.loads())) // message_bytes))
    for _ in range(ATTEMPTS):
        round_of = _round_of_flows(flows, before, total, rounds, max(1, message_bytes // LEAST))
        loads = (_sums(round_of * world + end, flows.bytes) for end in (flows.source, flows.target))
        heaviest = int(max(load.max(initial=0) for load in loads))
        if heaviest <= UNEVEN * message_bytes:
            break
        rounds = -(-rounds * heaviest // (UNEVEN * message_bytes))
    key = (round_of * world + flows.source) * world + flows.target
    order = np.argsort(key, kind="stable")  # a target's pieces are in order already
    new = np.ones(len(order), bool)
    new[1:] = np.diff(key[order]) != 0
    first = np.append(np.flatnonzero(new), len(order))
    reach = np.append(0, np.cumsum(flows.bytes[order]))
    content = np.cumsum(new) - 1
    heads = order[new]
    ends = np.stack([round_of[heads], flows.source[heads], flows.target[heads]], axis=1)
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


def _round_of_flows(flows: _Flows, before: Ints, total: Ints, rounds: int, least: int) -> Ints:
    """[F] the round of each flow. What two ranks exchange is spread evenly over the rounds; pairs with little to
    exchange use different rounds. `before`, `total`: bytes of the same pair before this flow, and in all."""
    count = np.clip(-(-total // least), 1, rounds)
    number = (2 * before + flows.bytes) * count // np.maximum(1, 2 * total)
    # Multiples of the golden ratio: the phases of neighbouring ranks are far from each other.
    phase = (flows.source + flows.target) * 40503 % PHASES
    round_of: Ints = (number * PHASES + phase) * rounds // (count * PHASES)
    return round_of


def _passed_on(hops: Ints, chains: list[list[int]]) -> Iterator[Ints]:
    """The hops inside the chains: each rank passes a content on one round after it got it."""
    for chain in chains:
        head = hops[hops[:, 2] == chain[0]] if len(chain) > 1 else hops[:0]
        for number, (source, target) in enumerate(itertools.pairwise(chain), 1):
            hop = head.copy()
            hop[:, 0] += number
            hop[:, 1], hop[:, 2] = source, target
            yield hop


def _running_sums(group: Ints, values: Ints) -> tuple[Ints, Ints]:
    """For each row the sum of `values` over the rows of its group before it, and over all rows of its group."""
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
    """[max(length, max(index) + 1)] the sum of the values of each index."""
    return np.rint(np.bincount(index, weights=values, minlength=length)).astype(np.int64)
