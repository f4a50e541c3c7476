"""Attention over packed sequences without a mask. It is causal within each sequence.

`varlen` is one call of torch's kernel for sequences of different lengths: GPUs only, half precision only; `flash4` is
another. `segments` works everywhere: sequences of similar length are unpacked into padded buckets, one
scaled_dot_product_attention each. The projections and the MLP run on packed tokens in all. A mask over the packed row
would cost the square of the micro-batch instead of the squares of its sequences.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from services.trainer.backends.fsdp2 import flash4
from services.trainer.backends.fsdp2.sequence_parallel import HeadExchange, RankTokens
from services.trainer.backends.recurrence import Segments
from services.trainer.protocol.microbatch import MicroBatch

Attention = Callable[..., tuple[Tensor, None]]
"""An implementation behind the attention interface of transformers."""

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    GROUPED_HEADS: dict[str, Any] = {}
else:
    # Later releases need an argument if there are fewer key heads than query heads.
    GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

SEGMENTS, VARLEN, FLASH4 = "millrace_segments", "millrace_varlen", "millrace_fa4"
"""Names of the implementations in transformers, which loads kernels for a name with "flash" in it."""
OWN = {"segments": SEGMENTS, "varlen": VARLEN, "flash_attention_4": FLASH4}
"""The same, by their values of trainer.backend_options.attention."""
FLASH2 = "flash_attention_2"
"""Transformers has an implementation of this name itself."""
HEAD_SIZES = ("head_dim", "global_head_dim")
"""Entries of a config with the size of a head: of all layers, and of some."""
LARGEST_HEAD = 256
"""Largest head dimension that the varlen kernel supports."""


def model_inputs(
    attention: str, tokens: RankTokens, device: torch.device, *, recurrent: bool = False
) -> dict[str, Any]:
    """Arguments of a model's forward pass for this rank's tokens of a micro-batch. `recurrent`: the model has layers
    that compute each sequence apart, whatever its attention is."""
    inputs = {"input_ids": tokens.tokens_t[None], "position_ids": tokens.places_t[None], "use_cache": False}
    shared = {} if tokens.exchange is None else {"exchange": tokens.exchange}
    apart = {"segments": Segments.of(tokens.whole.lengths, device)} if recurrent and attention != SEGMENTS else {}
    return {**inputs, **shared, **apart, **_packing(attention, tokens.whole, device)}


def _packing(attention: str, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Arguments with the beginnings of sequences; `sdpa` finds them in the positions."""
    if attention == SEGMENTS:
        return {"segments": Segments.of(batch.lengths, device)}
    if attention == VARLEN:
        # A power of two: compiled layers are not compiled again for each micro-batch's longest sequence.
        return {"starts": batch.starts.to(device), "longest": 1 << (max(batch.lengths) - 1).bit_length()}
    if attention in (FLASH2, FLASH4):
        starts, longest = batch.starts.to(device), max(batch.lengths)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {}


def varlen_fits(config: Any, compute: torch.dtype, device: torch.device) -> bool:
    """Whether torch has the varlen kernel here, and the kernel supports a model with this config (of the text part)."""
    head = _head(config, compute, device)
    if head is None or head > LARGEST_HEAD:
        return False
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def flash4_fits(config: Any, compute: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention 4 is installed here, and supports a model with this config (of the text part)."""
    head = _head(config, compute, device)
    return head is not None and flash4.installed() and flash4.supports(head, device)


def _head(config: Any, compute: torch.dtype, device: torch.device) -> int | None:
    """Size of a head; None if no kernel for packed sequences computes such heads in this precision, or there is no
    GPU."""
    if device.type != "cuda" or compute not in (torch.bfloat16, torch.float16):
        return None
    if getattr(config, "kv_lora_rank", None):  # keys and values of a head differ in size
        return None
    stated = [size for name in HEAD_SIZES if (size := getattr(config, name, None))]
    return max(stated, default=0) or int(config.hidden_size // config.num_attention_heads)


def exchanged(attention: Attention) -> Attention:
    """The attention with the keyword `exchange`: with it the given tokens are this rank's slice, and attention is over
    those of all ranks."""

    @functools.wraps(attention)
    def whole(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        exchange: HeadExchange | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if exchange is None:
            return attention(module, query, key, value, attention_mask, **named)
        out, _ = attention(module, *exchange.to_heads(query, key, value), attention_mask, **named)
        return exchange.to_tokens(out), None

    return whole


def attend_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    starts: Tensor,
    longest: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention by the varlen kernel, with the same tensors as `attend`.

    starts: int32 [sequences + 1], see `MicroBatch.starts`. longest: at least the length of the longest sequence.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window, **GROUPED_HEADS)
    assert isinstance(out, Tensor)
    return out[None], None


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
    """Attention over padded buckets, behind the attention interface of transformers.

    query [1, heads, P, d], key and value [1, kv heads, P, d] → [1, P, heads, d]. Padded places come after the places of
    their segment, so the causal mask excludes them.
    """
    heads = query.shape[1]
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for index in segments.buckets:
        # index_select, not tensor[index]: the gradient of the latter sorts every index, which took most of a step.
        q, k, v = (t.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for t in packed)
        if k.shape[1] != heads:
            k, v = (tensor.repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, **_causal(index, sliding_window))
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.place_p)[None], None


def _causal(index: Tensor, window: int | None) -> dict[str, Any]:
    longest = index.shape[1]
    if window is None or longest <= window:
        return {"is_causal": True}
    at = torch.arange(longest, device=index.device)
    behind = at[:, None] - at[None, :]
    return {"attn_mask": (behind >= 0) & (behind < window)}


AttentionInterface.register(SEGMENTS, exchanged(attend))
AttentionInterface.register(VARLEN, exchanged(attend_varlen))
AttentionInterface.register(FLASH4, exchanged(flash4.attend))
