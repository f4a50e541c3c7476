"""The sharded plan: every receiver gets the boxes that it wants from ranks that hold them, and nothing is gathered.

1. The senders' boxes are cut until none overlap, and intersected with the boxes that receivers want: the pieces.
2. If several ranks hold a piece's box, they share the sending: those on the receiver's host alone, if there are any,
   else so that all hosts send about as much.
3. The pieces that one rank sends to another are cut, in the manifest's order, into contents: the bytes of one message.
4. Contents are dealt to rounds, so that in a round no rank sends or receives more than about MESSAGE_BYTES, all links
   work at once, and all receivers get bytes evenly.
5. Replicas with the same layout pass contents on in a chain if the trainer could not send fast enough to all, and
   if they share a host that has no senders: what one of them got need not cross the network again. So one content
   may travel in several messages: its hops.

Pure and torch-free. Every rank computes the same plan, and its hash is compared before anything is sent.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from millrace.weights.plans.boxes import Boxes, Ints, sums
from millrace.weights.plans.contents import Contents, deal, flows_to, heaviest_loads
from millrace.weights.plans.hosts import UNKNOWN
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.wanted_pieces import ALIGNED, WantedPieces

MESSAGE_BYTES = 128 << 20
"""Bytes that a rank sends, and that it receives, in one round: about this, at most UNEVEN times that."""
GRAINS = 16
"""A piece is at most 1/GRAINS of a message, so that messages have about equal sizes."""


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
        for rows in self.pieces.encoded_rows():
            digest.update(rows)
        for column in (self.at, self.first, self.sizes, self.hops):
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

    def pieces_in(self, content: int) -> slice:
        """The rows of `pieces` and `at` that belong to a content."""
        return slice(int(self.first[content]), int(self.first[content + 1]))

    def egress(self) -> Ints:
        """[world_size] bytes that each rank sends."""
        return sums(self.hops[:, 1], self.sizes[self.hops[:, 3]], self.world_size)

    def ingress(self) -> Ints:
        """[world_size] bytes that each rank receives."""
        return sums(self.hops[:, 2], self.sizes[self.hops[:, 3]], self.world_size)


def plan(
    manifest: Manifest,
    senders: Sequence[Boxes],
    receivers: Sequence[Boxes],
    message_bytes: int = MESSAGE_BYTES,
    hosts: Sequence[str] = (),
) -> ShardedPlan:
    """`senders` and `receivers`: the boxes that each rank holds or wants, by rank; senders come first in the
    communicator. `hosts`: the name of each rank's host, "" if it is not known; empty: none is.

    Raises PublicationFailed if a receiver wants something that no sender holds.
    """
    wanted = WantedPieces.of(manifest, senders, receivers, max(ALIGNED, message_bytes // GRAINS))
    world = len(senders) + len(receivers)
    host_of = [*hosts] or [UNKNOWN] * world
    chains = _host_chains(wanted.targets, host_of, len(senders))
    flows = flows_to([chain[0] for chain in itertools.chain(*chains)], wanted, host_of)
    sent, received = heaviest_loads(flows)
    longest = round(sent / received) if received else 1
    joined = [chain for of_layout in chains for chain in _joined(of_layout, longest)]
    if longest > 1:
        flows = flows_to([chain[0] for chain in joined], wanted, host_of)
    contents = deal(flows, world, message_bytes)
    hops = _hops(contents, joined, world)
    rounds = int(hops[:, 0].max(initial=-1)) + 1
    pieces, at, first = contents.pieces(wanted)
    return ShardedPlan(manifest.hash, len(senders), world, rounds, pieces, at, first, contents.bytes, hops)


def _host_chains(targets: Sequence[Sequence[int]], hosts: Sequence[str], senders: int) -> list[list[list[int]]]:
    """For each layout its ranks as chains: the first rank of a chain gets its contents from senders, each passes them
    on to the next. Ranks of a host without senders are one chain, so that a content comes to that host once."""
    sending = {UNKNOWN, *hosts[:senders]}
    chains = []
    for alike in targets:
        of_host: dict[str, list[int]] = {}
        for rank in alike:
            of_host.setdefault(hosts[rank], []).append(rank)
        of_layout: list[list[int]] = []
        for host, ranks in of_host.items():
            of_layout += [[rank] for rank in ranks] if host in sending else [ranks]
        chains.append(of_layout)
    return chains


def _joined(chains: Sequence[list[int]], longest: int) -> Iterator[list[int]]:
    """Chains of one layout, up to `longest` of them made one: the trainer does not have to send to all."""
    for start in range(0, len(chains), max(1, longest)):
        yield [rank for chain in chains[start : start + max(1, longest)] for rank in chain]


def _hops(contents: Contents, chains: list[list[int]], world: int) -> Ints:
    """[M, 4] the messages that `contents` travel in: from a sender to the first rank of a chain, and along it. Each
    rank passes a content on one round after it got it."""
    number = np.arange(len(contents.bytes))
    heads = np.stack([contents.round, contents.source, contents.target, number], axis=1)
    parts = [heads]
    for chain in chains:
        head = heads[heads[:, 2] == chain[0]] if len(chain) > 1 else heads[:0]
        for later, (source, target) in enumerate(itertools.pairwise(chain), 1):
            hop = head.copy()
            hop[:, 0] += later
            hop[:, 1], hop[:, 2] = source, target
            parts.append(hop)
    if len(parts) == 1:
        return heads
    hops = np.concatenate(parts)
    # Messages of the same round and ranks are of the same part, which is in the order of its contents already.
    return hops[np.argsort((hops[:, 0] * world + hops[:, 1]) * world + hops[:, 2], kind="stable")]
