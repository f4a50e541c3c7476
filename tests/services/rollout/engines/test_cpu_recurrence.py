"""The core of a GatedDeltaNet on vLLM's CPU build, in pieces of any length, is what transformers computes at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from services.rollout.engines.vllm import cpu_recurrence
from tests.hybrid_models import IN_THREE, SIZES

SLOT = 2
PIECES = ([80], [1, 1, 78], [64, 1, 1, 14], [3, 77], [65, 15])


def core_of(layer: Any, hidden_1th: torch.Tensor) -> torch.Tensor:
    """What the layer's own forward pass gives its norm, [tokens, value heads, d]."""
    seen = []
    hook = layer.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer(hidden_1th)
    hook.remove()
    return seen[0].view(hidden_1th.shape[1], layer.num_v_heads, layer.head_v_dim)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_pieces_go_on_from_the_states_in_their_slot(pieces: list[int]) -> None:
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    sizes = {**SIZES, "linear_value_head_dim": 16}  # keys and values of different sizes share one cache
    theirs: Any = Qwen3_5GatedDeltaNet(transformers.Qwen3_5TextConfig(**sizes, **IN_THREE), 0)
    hidden_1th = torch.randn(1, sum(pieces), 64)
    channels, heads = theirs.conv_dim, theirs.num_v_heads
    garbage = torch.randn(4, 3, channels), torch.randn(4, heads, theirs.head_v_dim, theirs.head_k_dim)
    names = ("key_dim", "value_dim", "A_log", "dt_bias", "conv1d")
    ours = SimpleNamespace(kv_cache=garbage, tp_size=1, **{name: getattr(theirs, name) for name in names})
    others = [cache[:SLOT].clone() for cache in garbage]
    with torch.no_grad():
        expected = core_of(theirs, hidden_1th)
        inputs = [part(hidden_1th)[0] for part in (theirs.in_proj_qkv, theirs.in_proj_b, theirs.in_proj_a)]
        parts = zip(*(each.split(pieces) for each in inputs), strict=True)
        found = [cpu_recurrence._sequence(ours, SLOT, number > 0, *part) for number, part in enumerate(parts)]
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-6, rtol=1e-5)
    assert all(torch.equal(cache[:SLOT], before) for cache, before in zip(garbage, others, strict=True))
