"""The core of a GatedDeltaNet on vLLM's CPU build, in pieces of any length, is what transformers computes at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from services.rollout.engines.vllm import cpu_recurrence
from tests.hybrid_models import IN_THREE, SIZES

SLOTS = torch.tensor([2, 0])
PIECES = ([80], [1, 1, 78], [64, 1, 1, 14], [3, 77], [65, 15])


def core_of(layer: Any, hidden_nth: torch.Tensor) -> torch.Tensor:
    """What the layer's own forward pass gives its norm, [sequences, tokens, value heads, d]."""
    seen = []
    hook = layer.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer(hidden_nth)
    hook.remove()
    return seen[0].view(*hidden_nth.shape[:2], layer.num_v_heads, layer.head_v_dim)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_pieces_go_on_from_the_states_in_their_slots(pieces: list[int]) -> None:
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    sizes = {**SIZES, "linear_value_head_dim": 16}  # keys and values of different sizes share one cache
    theirs: Any = Qwen3_5GatedDeltaNet(transformers.Qwen3_5TextConfig(**sizes, **IN_THREE), 0)
    hidden_nth = torch.randn(len(SLOTS), sum(pieces), 64)
    channels, heads = theirs.conv_dim, theirs.num_v_heads
    left = torch.full((4, 3, channels), torch.nan), torch.randn(4, heads, theirs.head_v_dim, theirs.head_k_dim)
    names = ("key_dim", "value_dim", "A_log", "dt_bias", "conv1d")
    ours = SimpleNamespace(kv_cache=left, tp_size=1, **{name: getattr(theirs, name) for name in names})
    others = [cache[1::2].clone() for cache in left]
    with torch.no_grad():
        expected = core_of(theirs, hidden_nth)
        inputs = [part(hidden_nth) for part in (theirs.in_proj_qkv, theirs.in_proj_b, theirs.in_proj_a)]
        found = []
        for number, part in enumerate(zip(*(each.split(pieces, 1) for each in inputs), strict=True)):
            known = torch.full(SLOTS.shape, number > 0)
            found.append(cpu_recurrence._sequences(ours, SLOTS, known, *part))
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-6, rtol=1e-5)
    for cache, before in zip(left, others, strict=True):
        torch.testing.assert_close(cache[1::2], before, atol=0, rtol=0, equal_nan=True)
