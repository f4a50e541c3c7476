"""Ulysses sequence parallelism (arXiv 2309.14509): several ranks share a micro-batch.

Its packed tokens, padded to a multiple of the ranks, are cut into slices of equal length. A rank computes embeddings,
norms, MLP and head on its slice. Attention is over whole sequences: an all-to-all before it gives each rank all tokens
of a share of the heads, and another after it gives each rank its slice of all heads back.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

from services.trainer.backends.head import gather_scores
from services.trainer.protocol.backend import DataParallel
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.world import COLLECTIVE_S


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges slices of tokens for shares of heads. P is the number of tokens of all slices."""

    ranks: int
    group: str
    """Name of the process group, which a compiled layer takes as a constant."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's heads, from this rank's tokens of all heads, in one all-to-all.

        [1, heads, P/ranks, d] → [1, heads/ranks, P, d] for the query; key and value get the heads that these query
        heads read, each for the same number of query heads. A key-value head that several ranks read is sent to each
        of them, and its gradient is the sum of theirs.
        """
        key, value = (self._needed_heads(tensor, query.shape[1]) for tensor in (key, value))
        shares = [self._by_rank(tensor) for tensor in (query, key, value)]
        widths = [share.shape[2] for share in shares]
        parts = self._all_to_all(torch.cat(shares, dim=2)).flatten(0, 1).split(widths, dim=1)
        sizes = (query.shape[3], key.shape[3], value.shape[3])
        # Contiguous, as attention kernels get them without an exchange; the joined tensors are not kept for backward.
        q, k, v = (
            part.contiguous().unflatten(1, (-1, size)).transpose(0, 1)[None]
            for part, size in zip(parts, sizes, strict=True)
        )
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """[1, P, heads/ranks, d] → [1, P/ranks, heads, d]: what attention computed, for this rank's tokens."""
        by_rank = out[0].unflatten(0, (self.ranks, -1))
        out_thd: Tensor = self._all_to_all(by_rank.contiguous()).transpose(0, 1).flatten(1, 2)
        return out_thd[None]

    def _needed_heads(self, tensor: Tensor, heads: int) -> Tensor:
        """The key-value heads to send, those for rank 0 first: of a rank's query heads, runs of `run` heads read one
        key-value head each."""
        each, share = heads // tensor.shape[1], heads // self.ranks
        run = gcd(each, share)
        if run == each:  # each rank reads heads that no other reads
            return tensor
        return tensor.index_select(1, torch.arange(0, heads, run, device=tensor.device) // each)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """[1, heads, T, d] → [ranks, T, heads/ranks · d]"""
        by_rank: Tensor = tensor[0].unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2)
        return by_rank

    def _all_to_all(self, by_rank: Tensor) -> Tensor:
        """Sends the i-th part to rank i. The i-th part of the result came from rank i."""
        group: Any = self.group  # torch has a type of its own for the name
        received: Tensor = all_to_all_single_autograd(by_rank, None, None, group)
        return received


@dataclass(frozen=True)
class RankTokens:
    """The tokens of a micro-batch that one rank computes, T, on its device."""

    whole: MicroBatch
    """The micro-batch with the padding as a sequence at its end. Attention is over all of it."""
    tokens_t: Tensor
    """Token ids, int64 [T]."""
    places_t: Tensor
    """Positions in their sequences, int64 [T]."""
    positions_r: Tensor
    """For each sampled token that this rank scores, the place of the token before it among the T, int64."""
    targets_r: Tensor
    """Ids of the sampled tokens that this rank scores, int64."""
    counts: tuple[int, ...]
    """Number of sampled tokens that each rank of the group scores."""
    exchange: HeadExchange | None
    """What attention does before and after; None if this rank has all tokens."""
    others_rk: Tensor | None = None
    """Further tokens to score at the positions, int64 [R of this rank, K]."""


@dataclass(frozen=True)
class Turns:
    """Groups of ranks that have the same micro-batches and take turns at them. Every rank gets the results of all."""

    number: int = 0
    """The group of this rank."""
    count: int = 1
    group: ProcessGroup | None = None
    """The ranks that have this rank's place in each of the groups; None if there is one group."""

    def mine(self, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that this rank's group runs, as many as every group: the last may be padding."""
        missing = -len(microbatches) % self.count
        return [*microbatches, *[MicroBatch.pack([], [])] * missing][self.number :: self.count]

    def is_mine(self, number: int) -> bool:
        """Whether this rank's group runs the micro-batch of this number."""
        return number % self.count == self.number

    def everyones(self, mine: Sequence[Tensor], microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """The scores of each micro-batch, [R], from those that this rank's group computed. A collective."""
        if self.group is None:
            return list(mine)
        counts = [sum(batch.sampled_lengths) for batch in microbatches]
        totals = tuple(sum(counts[first :: self.count]) for first in range(self.count))
        flat = gather_scores(torch.cat(list(mine))[None], totals, self.group)[0]
        order = [number for first in range(self.count) for number in range(first, len(counts), self.count)]
        scored = dict(zip(order, flat.split([counts[number] for number in order]), strict=True))
        return [scored[number] for number in range(len(counts))]


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each micro-batch: consecutive ones, so that they are of one host."""

    rank: int = 0
    """This rank's place in the group, and the number of its slice."""
    size: int = 1
    group: ProcessGroup | None = None
    """None if one rank computes all of a micro-batch."""
    turns: Turns = field(default_factory=Turns)

    def tokens(self, batch: MicroBatch, device: torch.device) -> RankTokens:
        """This rank's tokens of a micro-batch."""
        padded = batch.padded(self.size)
        length = len(padded.tokens_p) // self.size
        first = self.rank * length
        mine = slice(first, first + length)
        # Sequences come one after the other, and so do the tokens that a rank scores.
        counts = torch.bincount(padded.predicting_r // length, minlength=self.size).tolist()
        scored_from = sum(counts[: self.rank])
        scored = slice(scored_from, scored_from + counts[self.rank])
        return RankTokens(
            padded,
            padded.tokens_p[mine].to(device),
            padded.positions_p[mine].to(device),
            (padded.predicting_r[scored] - first).to(device),
            padded.targets_r[scored].to(device),
            tuple(counts),
            None if self.group is None else HeadExchange(self.size, self.group.group_name),
            None if padded.others_rk is None else padded.others_rk[scored].to(device),
        )

    def whole_scores(self, mine_kr: Tensor, tokens: RankTokens) -> Tensor:
        """The scores of all sampled tokens of the micro-batch, [k, R], from those of each rank. A collective."""
        return gather_scores(mine_kr, tokens.counts, self.group)

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Inside, each rank of the group draws other numbers. Outside they draw the same, as they compute the same
        loss."""
        if self.size == 1:
            yield
            return
        common = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(common + self.rank)
            yield


def divide_ranks(size: int) -> tuple[SequenceGroup, DataParallel]:
    """The groups of this rank, if `size` ranks share a micro-batch. A collective. `size` divides the number of
    ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = dist.group.WORLD if ranks > 1 else None
    same_place = [range(place, ranks, size) for place in range(size)]
    data = everyone if size == 1 else _subgroup(same_place)
    return _sequence_group(size), DataParallel(rank // size, ranks // size, data)


def group_of_role(policy: SequenceGroup, size: int) -> SequenceGroup:
    """The ranks that share the micro-batches of a role, if that are fewer than those of the policy: the policy's
    ranks take turns in groups of `size`, which divides their number. A collective."""
    if size == policy.size:
        return policy
    count, ranks = policy.size // size, dist.get_world_size()
    starts = [first + place for first in range(0, ranks, policy.size) for place in range(size)]
    same_place = _subgroup([range(start, start + policy.size, size) for start in starts])
    return replace(_sequence_group(size), turns=Turns(policy.rank // size, count, same_place))


def _sequence_group(size: int) -> SequenceGroup:
    consecutive = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
    return SequenceGroup(dist.get_rank() % size, size, _subgroup(consecutive))


def _subgroup(groups: Sequence[range]) -> ProcessGroup | None:
    """The process group of this rank among `groups`, which divide all ranks; None if each has one rank. It has a
    communicator of its own even if it has all ranks: FSDP gathers weights meanwhile."""
    everyone = dist.group.WORLD
    return None if everyone is None or len(groups[0]) == 1 else _created(everyone, tuple(groups))


@functools.lru_cache(maxsize=16)
def _created(everyone: ProcessGroup, groups: tuple[range, ...]) -> ProcessGroup:
    """Kept, as the next job of these ranks needs the same."""
    timeout = timedelta(seconds=COLLECTIVE_S)
    mine: Any = dist.new_subgroups_by_enumeration([list(group) for group in groups], timeout=timeout)[0]
    created: ProcessGroup = mine
    return created
