"""A micro-batch as this rank runs it: packed sequences in Megatron's THD form, padded and split as the ranks need.

Tensor-parallel ranks share the tokens evenly, so the pack is padded to a multiple of their number with a sequence of
its own, which is not scored; only routers see it. Context-parallel ranks each take two slices of every sequence, one
from either end, so that causal attention costs them the same; for that every sequence is padded to a multiple of twice
their number. Padding at a sequence's end belongs to the sequence: no token before it attends to it, and attention
kernels leave no gap unwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.backends.megatron.experts.replay import PackedTokens
from services.trainer.protocol.microbatch import MicroBatch


@dataclass(frozen=True)
class PackedBatch:
    tokens_p: Tensor
    """int64 [P on this rank]."""
    parameters: PackedTokens
    positions_r: Tensor
    """int64: of the response tokens that are scored here, the place on this rank of the token before each."""
    targets_r: Tensor
    """int64: those response tokens."""
    order_r: Tensor | None
    """int64 [R]: of each response token of the micro-batch, its place in all context-parallel ranks' scores one after
    the other. None where this rank scores all of them, in order."""
    counts: tuple[int, ...]
    """Response tokens scored by each context-parallel rank."""


def pack(
    batch: MicroBatch, *, multiple: int, context_rank: int, context_size: int, device: torch.device
) -> PackedBatch:
    """`multiple`: what the number of tokens on a rank has to divide by."""
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
    if context_size == 1:
        parameters.experts_ltk = experts_ltk
        positions_r, targets_r = asked_r.to(device), batch.targets_r.to(device)
        return PackedBatch(tokens.to(device), parameters, positions_r, targets_r, None, (len(asked_r),))
    owner_p, local_p = context_split(padded, context_size)
    owner_r = owner_p[asked_r]
    mine_r = owner_r == context_rank
    counts = torch.bincount(owner_r, minlength=context_size)
    if experts_ltk is not None:
        parameters.experts_ltk = experts_ltk[:, (owner_p == context_rank).nonzero()[:, 0].to(device)]
    return PackedBatch(
        tokens[owner_p == context_rank].to(device),
        parameters,
        local_p[asked_r[mine_r]].to(device),
        batch.targets_r[mine_r].to(device),
        owner_r.argsort(stable=True).argsort().to(device),
        tuple(counts.tolist()),
    )


def _places(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """int64 [tokens]: where each token lies among the padded ones."""
    starts = torch.tensor([0, *padded]).cumsum(0).tolist()
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)])


def _experts(batch: MicroBatch, places_p: Tensor, tokens: int, device: torch.device) -> Tensor | None:
    """int [MoE layers, padded tokens, k]. Put in place on the device, as narrow as they came: for 48 layers of 65,536
    tokens the host would take a third of a second, in which the device waits."""
    if batch.experts_plk is None:
        return None
    _, layers, per_token = batch.experts_plk.shape
    padded_ltk = torch.full((layers, tokens, per_token), -1, dtype=batch.experts_plk.dtype, device=device)
    padded_ltk[:, places_p.to(device)] = batch.experts_plk.to(device).transpose(0, 1)
    return padded_ltk


def _parameters(padded: Sequence[int], device: torch.device, *, split: bool) -> PackedTokens:
    """The sequences' ends, padding included. The pad sequence, if any, counts as a sequence."""
    ends = torch.tensor([0, *padded]).cumsum(0).int().to(device)
    longest = max(padded)
    # Context parallelism insists on the ends with padding; without it they would be compared in every layer.
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
    """Of each padded token, the context-parallel rank that has it and its place there, both int64.

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
