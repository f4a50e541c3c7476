"""Attention over packed sequences without a mask: segments of like length side by side, each causal.

The projections and the MLP run on packed tokens; only here are the sequences unpacked, into buckets that waste little,
so that scaled_dot_product_attention can use its causal kernels on every device. A packed mask would cost the square of
the micro-batch instead of the squares of its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from services.trainer.protocol.microbatch import MicroBatch

NAME = "millrace_segments"
WIDEST = 1.25
"""A bucket's longest segment is at most so many times its shortest."""
FEWEST_TOKENS = 64
"""Segments shorter than this share a bucket: there the number of calls costs more than padding."""


@dataclass(frozen=True)
class Segments:
    """Where the segments of a packed row stand in padded buckets, and the way back."""

    buckets: tuple[Tensor, ...]
    """int64 [segments, longest] each: packed position of every padded place; places past the end repeat the first."""
    place_p: Tensor
    """int64 [P]: of each packed position its place in the buckets, laid out one after the other."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        place_p = torch.empty(starts[-1], dtype=torch.int64)
        buckets, base = [], 0
        for members in _alike(lengths):
            longest = lengths[members[-1]]
            offsets = torch.arange(longest)
            starts_b = torch.tensor([starts[member] for member in members])
            lengths_b = torch.tensor([lengths[member] for member in members])
            inside = offsets[None, :] < lengths_b[:, None]
            index = starts_b[:, None] + torch.where(inside, offsets[None, :], 0)
            place_p[index[inside]] = base + inside.view(-1).nonzero().squeeze(1)
            buckets.append(index.to(device))
            base += index.numel()
        return cls(tuple(buckets), place_p.to(device))


def packing(attention: str, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """How a model with that attention learns where sequences begin; `sdpa` sees it in the positions."""
    if attention == NAME:
        return {"segments": Segments.of(batch.lengths, device)}
    if attention == "flash_attention_2":
        starts, longest = batch.starts.to(device), max(batch.lengths)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {}


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Segments in order of length, cut where the length has grown too much."""
    groups: list[list[int]] = []
    for member in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[member] <= max(FEWEST_TOKENS, WIDEST * lengths[groups[-1][0]]):
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: query [1, heads, P, d], key and value [1, kv heads, P, d] → [1, P, heads, d].

    Padded places come after the segment's own, so causality alone keeps them out.
    """
    heads = query.shape[1]
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for index in segments.buckets:
        q, k, v = (tensor[index].transpose(1, 2) for tensor in packed)
        if k.shape[1] != heads:
            k, v = (tensor.repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, **_causal(index, sliding_window))
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[segments.place_p][None], None


def _causal(index: Tensor, window: int | None) -> dict[str, Any]:
    longest = index.shape[1]
    if window is None or longest <= window:
        return {"is_causal": True}
    at = torch.arange(longest, device=index.device)
    behind = at[:, None] - at[None, :]
    return {"attn_mask": (behind >= 0) & (behind < window)}


AttentionInterface.register(NAME, attend)
