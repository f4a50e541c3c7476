"""The adapter that the Transformers engine adds to linear layers of its model."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from millrace.weights.plans.manifest import Manifest
from services.rollout.engines.adapter import AdapterShape, not_served


class AdapterSlot:
    """See `LoadedPart`. Zero at first: the model computes as without it."""

    padded: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module, shape: AdapterShape, dtype: str) -> None:
        """Raises InvalidJob where the model has no such linear layer."""
        self._shape = shape
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for layer in shape.layers:
            linear = _linear(model, layer.name)
            like = {"dtype": getattr(torch, dtype), "device": linear.weight.device}
            lora_a_ri = self._tensors[layer.lora_a] = torch.zeros(shape.rank, layer.inputs, **like)
            lora_b_or = self._tensors[layer.lora_b] = torch.zeros(layer.outputs, shape.rank, **like)
            linear.register_forward_hook(partial(_add, lora_a_ri, lora_b_or))

    @property
    def loaded(self) -> Mapping[str, Tensor]:
        """See `LoadedPart`."""
        return self._tensors

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `LoadedPart`."""
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)

    def check(self, manifest: Manifest) -> None:
        """See `LoadedPart`."""
        self._shape.check(manifest, self._dtype)

    def update_derived(self) -> None:
        """See `LoadedPart`. Nothing is derived."""


def _linear(model: nn.Module, name: str) -> nn.Linear:
    try:
        part = model.get_submodule(name)
    except AttributeError:
        part = model
    if not isinstance(part, nn.Linear):
        raise not_served(f"transformers has no linear layer {name} in this model")
    return part


def _add(lora_a_ri: Tensor, lora_b_or: Tensor, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """The layer's output with the adapter's: W x + B (A x)."""
    return output + functional.linear(functional.linear(inputs[0], lora_a_ri), lora_b_or)
