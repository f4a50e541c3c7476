"""A micro-batch as this rank runs it: packed sequences in Megatron's THD format, padded and split for the ranks.

Tensor-parallel ranks split the tokens evenly, so the pack is padded to a multiple of their number by a separate
sequence, which is not scored; only routers see it. Each context-parallel rank takes two slices of every sequence, one
from each end, so that causal attention costs every rank the same. For that every sequence is padded to a multiple of
twice their number. Padding at the end of a sequence belongs to the sequence: no token before it attends to it, and
attention kernels write all of their output.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from services.trainer.backends.recurrence import Segments
from services.trainer.backends.tower import Images, Part, Tower, places
from services.trainer.protocol.microbatch import MicroBatch


@dataclass(frozen=True)
class SeenBatch:
    """A micro-batch of a job with images. What its images give to the model is computed when a stage asks for it."""

    images: Images
    """The tower on ranks of the first stage."""
    batch: MicroBatch
    places_p: Tensor
    """For each token its place among the padded tokens, int64 in host memory."""
    local_p: Tensor
    """For each padded token its place on this rank, int64 in host memory; negative for tokens of other context-parallel
    ranks."""
    device: torch.device

    def features(self) -> tuple[Tensor, Tensor] | None:
        """The places of the images' tokens on this context-parallel rank, int64 [N], and their features, those of
        embeddings and those of each of the first layers, [1 + layers, N, H]. On the first stage; None if there are no
        images."""
        assert isinstance(self.images, Tower), "only the first stage has the tower"
        if not self.batch.images:
            return None
        features_fnh = self.images.features(self.batch)
        local_n = self.local_p[self.places_p[places(self._parts)]]
        mine_n = (local_n >= 0).nonzero()[:, 0]
        if len(mine_n) < len(local_n):
            features_fnh = features_fnh[:, mine_n.to(self.device)]
        return local_n[mine_n].to(self.device), features_fnh

    @cached_property
    def _parts(self) -> list[Part]:
        return self.images.parts(self.batch)

    @cached_property
    def positions(self) -> Tensor:
        """Positions by time, height and width of the tokens on this rank, int64 [3, 1, P]."""
        padded_3p = torch.zeros(3, len(self.local_p), dtype=torch.int64)
        padded_3p[:, self.places_p] = self.images.positions(self._parts)[1:]
        return padded_3p[:, self.local_p >= 0][:, None].to(self.device)


@dataclass
class PackedTokens(PackedSeqParams):  # type: ignore[misc]  # megatron has no types
    """Megatron's description of packed sequences, with what more the layers of this rank are to know of its tokens."""

    experts_ltk: Tensor | None = None
    """The engine's choices of experts, int [MoE layers of the model, tokens, experts per token]; negative where the
    engine reported nothing."""
    seen: SeenBatch | None = None
    """In a job with images."""
    added: tuple[Tensor, Tensor] | None = None
    """What the first layers add to their outputs: places of tokens on this rank, int64 [N], and for each of these
    layers features of images, [layers, N, H]."""

    def adding(self, places_n: Tensor, features_lnh: Tensor) -> "PackedTokens":
        """The same tokens for one pass, in which the first layers add these features. A copy: it lives as long as the
        pass needs the features, and the original as long as the step."""
        if not len(features_lnh):
            return self
        found = copy(self)
        found.added = places_n, features_lnh
        return found

    @cached_property
    def segments(self) -> Segments:
        """The sequences in padded buckets, for layers that compute each apart."""
        return Segments.of(self.cu_seqlens_q.diff().tolist(), self.cu_seqlens_q.device)


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of a micro-batch on this rank."""

    tokens_p: Tensor
    """Token ids, int64 [P on this rank]."""
    parameters: PackedTokens
    positions_r: Tensor
    """For each sampled token that is scored here, the place of the token before it on this rank, int64."""
    targets_r: Tensor
    """Ids of the sampled tokens that are scored here, int64."""
    order_r: Tensor | None
    """For each sampled token of the micro-batch, its place in the concatenated scores of all context-parallel ranks,
    int64 [R]. None if this rank scores all of them, in order."""
    counts: tuple[int, ...]
    """Number of sampled tokens that each context-parallel rank scores."""
    others_rk: Tensor | None = None
    """Further tokens to score at the positions, int64 [R here, K]."""


def pack(
    batch: MicroBatch,
    *,
    multiple: int,
    context_rank: int,
    context_size: int,
    device: torch.device,
    images: Images | None = None,
) -> PackedBatch:
    """Packs a micro-batch for this rank. The number of tokens on a rank is a multiple of `multiple`. `images`: of a job
    with images."""
    unit = 2 * context_size if context_size > 1 else 1
    padded = [-(-length // unit) * unit for length in batch.lengths]
    rest = -sum(padded) % (multiple * unit)
    if rest:
        padded.append(rest)
    places_p = _places(batch.lengths, padded)
    tokens = torch.zeros(sum(padded), dtype=torch.int64)
    tokens[places_p] = batch.tokens_p
    asked_r = places_p[batch.predicting_r]
    parameters = _parameters(padded, device, split=context_size > 1)
    experts_ltk = _experts(batch, places_p, len(tokens), device)
    others_rk = None if batch.others_rk is None else batch.others_rk.to(device)
    if context_size == 1:
        parameters.experts_ltk = experts_ltk
        if images is not None:
            parameters.seen = SeenBatch(images, batch, places_p, torch.arange(len(tokens)), device)
        positions_r, targets_r = asked_r.to(device), batch.targets_r.to(device)
        alone = (len(asked_r),)
        return PackedBatch(tokens.to(device), parameters, positions_r, targets_r, None, alone, others_rk)
    owner_p, local_p = context_split(padded, context_size)
    owner_r = owner_p[asked_r]
    mine_r = owner_r == context_rank
    counts = torch.bincount(owner_r, minlength=context_size)
    if experts_ltk is not None:
        parameters.experts_ltk = experts_ltk[:, (owner_p == context_rank).nonzero()[:, 0].to(device)]
    if images is not None:
        mine_p = torch.where(owner_p == context_rank, local_p, -1)
        parameters.seen = SeenBatch(images, batch, places_p, mine_p, device)
    return PackedBatch(
        tokens[owner_p == context_rank].to(device),
        parameters,
        local_p[asked_r[mine_r]].to(device),
        batch.targets_r[mine_r].to(device),
        owner_r.argsort(stable=True).argsort().to(device),
        tuple(counts.tolist()),
        None if others_rk is None else others_rk[mine_r.to(device)],
    )


def _places(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """The place of each token among the padded tokens, int64 [tokens]."""
    starts = torch.tensor([0, *padded]).cumsum(0).tolist()
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)])


def _experts(batch: MicroBatch, places_p: Tensor, tokens: int, device: torch.device) -> Tensor | None:
    """The engine's choices, int [MoE layers, padded tokens, k]. They are rearranged on the device, in their narrow
    dtype: for 48 layers of 65,536 tokens the host would take a third of a second while the device waits."""
    if batch.experts_plk is None:
        return None
    _, layers, per_token = batch.experts_plk.shape
    padded_ltk = torch.full((layers, tokens, per_token), -1, dtype=batch.experts_plk.dtype, device=device)
    padded_ltk[:, places_p.to(device)] = batch.experts_plk.to(device).transpose(0, 1)
    return padded_ltk


def _parameters(padded: Sequence[int], device: torch.device, *, split: bool) -> PackedTokens:
    """Megatron's description of the sequences, with their padding. A sequence of padding counts as a sequence."""
    ends = torch.tensor([0, *padded]).cumsum(0).int().to(device)
    longest = max(padded)
    # Context parallelism needs the ends with padding; without it they would only be compared in every layer.
    again = ends if split else None
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=again,
        cu_seqlens_kv_padded=again,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def context_split(padded: Sequence[int], ranks: int) -> tuple[Tensor, Tensor]:
    """The context-parallel rank that has each padded token, and the token's place there, both int64.

    Slice i of 2·ranks and slice 2·ranks − 1 − i of every sequence belong to rank i.
    """
    slices = torch.arange(2 * ranks)
    owners = torch.minimum(slices, 2 * ranks - 1 - slices)
    owner_p = torch.cat([owners.repeat_interleave(length // (2 * ranks)) for length in padded])
    local_p = torch.empty_like(owner_p)
    for rank in range(ranks):
        mine = owner_p == rank
        local_p[mine] = torch.arange(int(mine.sum()))
    return owner_p, local_p
