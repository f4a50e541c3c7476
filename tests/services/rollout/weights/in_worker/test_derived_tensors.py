"""Derived tensors are computed again in place, in whichever way a release of vLLM keeps them."""

import pytest
import torch
from torch import nn

from services.rollout.weights.in_worker.model import DerivedTensors

HEADS, LATENT, KEY, VALUE = 2, 8, 3, 4


class Attention(nn.Module):
    """Attention as vLLM has it. `kept` says how it keeps the two derived tensors."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.computed = kept, 0
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (KEY + VALUE), bias=False)
        self.process_weights_after_loading(torch.float32)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv_b_proj.weight.detach().T.view(LATENT, HEADS, KEY + VALUE).split([KEY, VALUE], dim=-1)
        return keys.permute(1, 2, 0), values.transpose(0, 1)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.computed += 1
        for name, tensor in zip(("W_UK_T", "W_UV"), self.expected(), strict=True):
            kept = tensor if self.kept == "views" else tensor.contiguous().to(dtype)
            setattr(self, name, nn.Parameter(kept, requires_grad=False) if self.kept == "parameters" else kept)


@pytest.mark.parametrize("kept", ["views", "tensors", "parameters"])
def test_it_follows_in_place(kept: str) -> None:
    model = nn.ModuleDict({"first": Attention(kept), "norm": nn.LayerNorm(4), "second": Attention(kept)})
    derived = DerivedTensors(model, torch.float32)
    both = [model["first"], model["second"]]
    at = [(m.W_UK_T.data_ptr(), m.W_UV.data_ptr()) for m in both]
    for module in both:
        nn.init.normal_(module.kv_b_proj.weight)
    derived.update()
    assert [(m.W_UK_T.data_ptr(), m.W_UV.data_ptr()) for m in both] == at
    for module in both:
        for name, expected in zip(("W_UK_T", "W_UV"), module.expected(), strict=True):
            assert torch.equal(getattr(module, name), expected), name
        assert module.computed == (1 if kept == "views" else 2), "views cost nothing"
    assert derived.names == {f"{path}.{name}" for path in ("first", "second") for name in ("W_UK_T", "W_UV")}
    others = {name for name, _ in model.named_parameters()} - derived.names
    assert others == {"first.kv_b_proj.weight", "second.kv_b_proj.weight", "norm.weight", "norm.bias"}


class Folded(nn.Module):
    """A model as SGLang has it: it computes its derived tensors by `post_load_weights`, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (KEY + VALUE), bias=False)
        self.w_kc = self.kv_b_proj.weight.detach().clone()

    def post_load_weights(self) -> None:
        self.w_kc.copy_(self.kv_b_proj.weight)


def test_a_model_that_computes_them_itself_is_asked_to() -> None:
    model = Folded()
    derived, at = DerivedTensors(model, torch.float32), model.w_kc.data_ptr()
    nn.init.normal_(model.kv_b_proj.weight)
    derived.update()
    assert torch.equal(model.w_kc, model.kv_b_proj.weight) and model.w_kc.data_ptr() == at
    assert derived.names == frozenset()


def test_a_model_without_any_has_none() -> None:
    derived = DerivedTensors(nn.Linear(4, 4), torch.float32)
    assert derived.names == frozenset()
    derived.update()
