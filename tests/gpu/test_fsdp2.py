"""Kernels for packed sequences against slower references, on a GPU in bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.backends.fsdp2 import flash4
from services.trainer.backends.fsdp2.attention import attend, attend_varlen, flash4_fits, varlen_fits
from services.trainer.backends.fsdp2.proof.implementations import attend_flash
from services.trainer.backends.recurrence import Segments

pytestmark = pytest.mark.gpu
LENGTHS = [3, 700, 1, 64, 255, 256]


def drawn(heads: int, kv_heads: int, size: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Query, key and value [1, heads, P, size] of one packed row, weights of the outputs [P, heads, size], and where
    the sequences begin."""
    torch.manual_seed(0)
    named: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = [
        torch.randn(1, count, sum(LENGTHS), size, requires_grad=True, **named) for count in (heads, kv_heads, kv_heads)
    ]
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32, device="cuda").cumsum(0).int()
    return inputs, torch.randn(sum(LENGTHS), heads, size, **named), starts


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads, kv_heads, size", [(16, 8, 128), (4, 4, 64), (8, 1, 256)])
def test_varlen_equals_segments(heads: int, kv_heads: int, size: int, window: int | None) -> None:
    inputs, weights, starts = drawn(heads, kv_heads, size)
    segments = Segments.of(LENGTHS, torch.device("cuda"))
    found = []
    for call in (
        lambda: attend(torch.nn.Module(), *inputs, None, segments=segments, sliding_window=window),
        lambda: attend_varlen(torch.nn.Module(), *inputs, None, starts=starts, longest=1024, sliding_window=window),
    ):
        out, _ = call()
        found.append([out, *torch.autograd.grad((out[0] * weights).sum(), inputs)])
    for buckets, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, buckets, atol=0.06, rtol=0.03)


@pytest.mark.parametrize("window, cap", [(None, None), (100, None), (None, 5.0), (100, 5.0)])
@pytest.mark.parametrize("heads, kv_heads, size", [(16, 2, 128), (4, 4, 64), (8, 1, 256)])
def test_flash4_equals_the_reference(
    heads: int, kv_heads: int, size: int, window: int | None, cap: float | None
) -> None:
    """Compiled, as layers are."""
    pytest.importorskip("flash_attn.cute")
    torch.compiler.reset()  # torch compiles a function for eight settings at most, and then runs it as it is
    inputs, weights, starts = drawn(heads, kv_heads, size)
    settings = {"cu_seq_lens_q": starts, "max_length_q": max(LENGTHS), "sliding_window": window, "softcap": cap}
    found = []
    for call, given in (
        (attend_flash, [tensor.detach().float().requires_grad_() for tensor in inputs]),
        (torch.compile(flash4.attend), inputs),
    ):
        out, _ = call(torch.nn.Module(), *given, None, **settings)
        found.append([out, *torch.autograd.grad((out[0] * weights).sum(), given)])
    for reference, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel.float(), reference.float(), atol=0.06, rtol=0.03)


def test_which_models_they_take() -> None:
    config, device = (
        type("Config", (), {"head_dim": 128, "hidden_size": 1, "num_attention_heads": 1}),
        torch.device("cuda"),
    )
    assert varlen_fits(config, torch.bfloat16, device)
    assert flash4_fits(config, torch.bfloat16, device) == flash4.installed()
    assert not varlen_fits(config, torch.float32, device)
    assert not varlen_fits(type("Latent", (config,), {"kv_lora_rank": 512}), torch.bfloat16, device)
    assert not varlen_fits(type("Wide", (config,), {"head_dim": 512}), torch.bfloat16, device)
