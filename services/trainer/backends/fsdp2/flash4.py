"""FlashAttention 4 over packed sequences: a kernel for Hopper and Blackwell GPUs, in half precision.

The package's own functions end the graphs of compiled layers and are compiled again for each micro-batch. Here its
forward and its backward pass are operators of torch, which compiled layers call as they are.
"""

import functools
import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DISTRIBUTION = "flash-attn-4"
LARGEST_HEAD = {9: 256, 10: 128, 11: 128}
"""Largest head dimension, by major compute capability."""
MULTIPLE = 8
"""Head dimensions are multiples of it."""


def installed() -> bool:
    return any(importlib.metadata.distributions(name=DISTRIBUTION))


def supports(head: int, device: torch.device) -> bool:
    """Whether the kernel has heads of this size on this device."""
    if device.type != "cuda":
        return False
    capability, _ = torch.cuda.get_device_capability(device)
    return head % MULTIPLE == 0 and head <= LARGEST_HEAD.get(capability, 0)


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("flash_attn.cute.interface")


@torch.library.custom_op("millrace::flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, causal: bool, window: int, cap: float
) -> tuple[Tensor, Tensor]:
    """Attention [P, heads, d] and the logarithms of the sums of exponentials, float32 [heads, P]. `window`: places to
    each side of a token that it attends to, -1 for all. `cap`: see `attend`, 0 for none."""
    out, sums, *_ = _kernels()._flash_attn_fwd(
        *(tensor.contiguous() for tensor in (q, k, v)),
        softmax_scale=scale,
        softcap=cap,
        return_lse=True,
        **_shared(starts, longest, causal, window),
    )
    return out, sums


@_forward.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("millrace::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, `k` and `v`, of that of `out`."""
    of_q, of_k, of_v, *_ = _kernels()._flash_attn_bwd(
        *(tensor.contiguous() for tensor in (q, k, v, out, grad)),
        sums,
        softmax_scale=scale,
        softcap=cap,
        **_shared(starts, longest, causal, window),
    )
    return of_q, of_k, of_v


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _shared(starts: Tensor, longest: int, causal: bool, window: int) -> dict[str, Any]:
    """What both passes get of the row's sequences and of which tokens attend to which."""
    side = None if window < 0 else window
    return {
        "causal": causal,
        "window_size_left": side,
        "window_size_right": side,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention behind the attention interface of transformers, with the keywords of `flash_attention_2`.

    query [1, heads, P, d], key and value [1, kv heads, P, d] → [1, P, heads, d]. cu_seq_lens_q: int32 [sequences + 1],
    see `MicroBatch.starts`. softcap: scores become softcap * tanh(scores / softcap).
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = -1 if sliding_window is None else sliding_window - 1
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = _forward(q, k, v, cu_seq_lens_q, max_length_q, scale, causal, window, softcap or 0.0)
    return out[None], None
