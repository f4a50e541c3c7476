"""The core of GatedDeltaNet (arXiv 2412.06464) on vLLM's CPU build: convolution and recurrence of Qwen3-Next, Qwen3.5.

vLLM's own core takes bfloat16 and certain head sizes only, and on hosts with AVX512-BF16 it reads convolution weights
that vLLM packed after loading. This package keeps weights as they are loaded (`cpu_weights`), so that they can be
published, and therefore computes the core itself: in torch, for any dtype and size.
"""

import inspect
import typing
from importlib import import_module
from typing import Any

OPERATORS = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
CORE = "cpu_gdn_attention_core"


def install() -> None:
    """Puts `compute` in the place of vLLM's core, if this release has one. Called before a model is built."""
    try:
        operators: Any = import_module(OPERATORS)
        own = getattr(operators, CORE)
    except (ImportError, AttributeError):
        return
    compute.__annotations__ = {**typing.get_type_hints(own), "return": None}  # torch makes the operator's schema of it
    setattr(operators, CORE, compute)


def compute(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    """Writes the layer's output before its norm to core_attn_out [tokens, value heads, d], and the states of the
    sequences to the layer's cache.

    mixed_qkv: [tokens, channels], one sequence after the other, those that decode a token first. b, a: [tokens, value
    heads].
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory
        return
    batch: Any = context.attn_metadata[layer.prefix]
    assert batch.num_accepted_tokens is None, "speculative decoding is refused on the CPU"
    starts, slots = batch.non_spec_query_start_loc.tolist(), batch.non_spec_state_indices_tensor.tolist()
    for row in range(batch.num_decodes + batch.num_prefills):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        known = row < batch.num_decodes or bool(batch.has_initial_state[row])
        inputs = mixed_qkv[tokens], b[tokens], a[tokens]
        core_attn_out[tokens] = _sequence(layer, slots[row], known, *inputs)


def _sequence(layer: Any, slot: int, known: bool, mixed_tc: Any, b_th: Any, a_th: Any) -> Any:
    """The output for the next tokens of the sequence whose states are in `slot`; with `known` they go on from these
    states. [tokens, value heads, d]."""
    import torch.nn.functional as F
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    _, _, value_size, key_size = layer.kv_cache[1].shape
    state = layer.kv_cache[1].view(*layer.kv_cache[1].shape[:2], key_size, value_size)[slot]
    mixed_tc = F.silu(_convolved(layer, slot, known, mixed_tc))
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    query, key, value = (
        part.unflatten(-1, (-1, size))[None]
        for part, size in zip(mixed_tc.split([keys, keys, values], -1), (key_size, key_size, value_size), strict=True)
    )
    repeats = value.shape[2] // query.shape[2]
    decay = -layer.A_log.float().exp() * F.softplus(a_th.float() + layer.dt_bias.float())
    rule = qwen.torch_recurrent_gated_delta_rule if len(mixed_tc) == 1 else qwen.torch_chunk_gated_delta_rule
    out, last = inspect.unwrap(rule)(
        query.repeat_interleave(repeats, 2),
        key.repeat_interleave(repeats, 2),
        value,
        g=decay[None],
        beta=b_th.float().sigmoid()[None],
        initial_state=state[None].float() if known else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state.copy_(last[0])
    return out[0]


def _convolved(layer: Any, slot: int, known: bool, mixed_tc: Any) -> Any:
    """The causal convolution over time, and in the cache the last columns that it needs next."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    weight = layer.conv1d.weight.flatten(1)[:, None]  # [channels, 1, width]
    cache = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    before = cache[slot] if known else torch.zeros_like(cache[slot])
    columns_ct = torch.cat([before.to(mixed_tc.dtype), mixed_tc.t()], 1)
    cache[slot].copy_(columns_ct[:, -before.shape[1] :])
    out_ct = F.conv1d(columns_ct[None], weight.to(mixed_tc.dtype), layer.conv1d.bias, groups=len(weight))[0]
    return out_ct.t()
