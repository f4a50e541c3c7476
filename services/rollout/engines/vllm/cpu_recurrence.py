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
    heads]. Sequences that get equally many tokens are computed together.
    """
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory
        return
    batch: Any = context.attn_metadata[layer.prefix]
    assert batch.num_accepted_tokens is None, "speculative decoding is refused on the CPU"
    starts, slots = batch.non_spec_query_start_loc, batch.non_spec_state_indices_tensor
    sequences = batch.num_decodes + batch.num_prefills
    known = torch.arange(sequences) < batch.num_decodes
    if batch.has_initial_state is not None:
        known |= batch.has_initial_state[:sequences]
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(starts[: sequences + 1].diff().tolist()):
        by_length.setdefault(length, []).append(row)
    for length, rows in by_length.items():
        if not length:
            continue
        taken_nt = starts[rows][:, None] + torch.arange(length)
        inputs = mixed_qkv[taken_nt], b[taken_nt], a[taken_nt]
        core_attn_out[taken_nt] = _sequences(layer, slots[rows], known[rows], *inputs)


def _sequences(layer: Any, slots_n: Any, known_n: Any, mixed_ntc: Any, b_nth: Any, a_nth: Any) -> Any:
    """The output for the next t tokens of n sequences whose states are in `slots_n`; those that are `known_n` go on
    from these states. [n, t, value heads, d]."""
    import torch
    import torch.nn.functional as F
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    _, _, value_size, key_size = layer.kv_cache[1].shape
    states = layer.kv_cache[1].view(*layer.kv_cache[1].shape[:2], key_size, value_size)
    mixed_ntc = F.silu(_convolved(layer, slots_n, known_n, mixed_ntc))
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    query, key, value = (
        part.unflatten(-1, (-1, size))
        for part, size in zip(mixed_ntc.split([keys, keys, values], -1), (key_size, key_size, value_size), strict=True)
    )
    repeats = value.shape[2] // query.shape[2]
    before = torch.where(known_n[:, None, None, None], states[slots_n].float(), 0.0)
    rule = qwen.torch_recurrent_gated_delta_rule if mixed_ntc.shape[1] == 1 else qwen.torch_chunk_gated_delta_rule
    out, after = inspect.unwrap(rule)(
        query.repeat_interleave(repeats, 2),
        key.repeat_interleave(repeats, 2),
        value,
        g=-layer.A_log.float().exp() * F.softplus(a_nth.float() + layer.dt_bias.float()),
        beta=b_nth.float().sigmoid(),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots_n] = after.to(states.dtype)
    return out


def _convolved(layer: Any, slots_n: Any, known_n: Any, mixed_ntc: Any) -> Any:
    """The causal convolution over time, and in the cache the last columns that it needs next."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    weight = layer.conv1d.weight.flatten(1)[:, None]  # [channels, 1, width]
    cache = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    before = torch.where(known_n[:, None, None], cache[slots_n], 0.0).to(mixed_ntc.dtype)
    columns_nct = torch.cat([before, mixed_ntc.transpose(1, 2)], 2)
    cache[slots_n] = columns_nct[:, :, -before.shape[2] :].to(cache.dtype)
    out_nct = F.conv1d(columns_nct, weight.to(mixed_ntc.dtype), layer.conv1d.bias, groups=len(weight))
    return out_nct.transpose(1, 2)
