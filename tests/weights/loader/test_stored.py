"""The tensors that are stored for a module's are those of transformers, which is asked for the conversions once."""

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from millrace.weights.loader import stored
from tests.services.trainer.backends.megatron import tiny


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixtral", "qwen2_5_vl"])
def test_pieces_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = tiny.random_model(kind), []
    mapping = stored.get_model_conversion_mapping
    monkeypatch.setattr(stored, "get_model_conversion_mapping", lambda *a, **o: asked.append(a) or mapping(*a, **o))
    for name, tensor in stored.stored_tensors(module):
        found, expected = stored.pieces(module, name, tensor), revert_weight_conversion(module, {name: tensor})
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[piece], part) for piece, part in expected.items())
    assert len(asked) == 1


def test_a_folder_that_keeps_experts_together_is_followed_after_sharding_too() -> None:
    module = tiny.random_model("qwen3_moe")
    names = {name for name, _ in stored.stored_tensors(module)}
    experts = min(name for name in names if name.endswith(".mlp.experts.down_proj"))
    tensor = module.get_parameter(experts)
    assert len(stored.pieces(module, experts, tensor)) > 1
    stored.follow_folder(module, names)
    module.__class__ = type("Sharded", (type(module),), {})
    assert list(stored.pieces(module, experts, tensor)) == [experts]
