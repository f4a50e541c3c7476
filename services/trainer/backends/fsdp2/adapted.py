"""A module with adapters, without PEFT: which layers get the adapter that a job asks for, which of the module's tensors
are adapters, and its weights with the adapters added."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.lora import AskedAdapter, recurrent_layers
from millrace.spec.lora import Lora, is_router
from millrace.weights.loader.stored import pieces, stored_tensors
from millrace.weights.plans.manifest import Content
from services.trainer.backends.tower import tower_layers
from services.trainer.protocol.adapter import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    AdapterSettings,
    Published,
    is_adapter,
    merged,
    stored_name,
    tensor_name,
)

BASE = ".base_layer."
"""Part of the names of tensors that belong to a layer with an adapter, and not to the adapter."""


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer, as this rank holds it."""

    lora_a_ri: Tensor
    lora_b_or: Tensor
    magnitude_o: Tensor | None

    def merged(self, weight_oi: Tensor, lora_a_ri: Tensor, scale: float) -> Tensor:
        """This rank's rows of the layer's weight with the adapter added, float32 [rows, in], computed on the device of
        `lora_a_ri`, the whole matrix A. Of B and the magnitudes a rank has the rows that it has of the weight."""
        there = lora_a_ri.device
        magnitude_o = None if self.magnitude_o is None else local(self.magnitude_o).to(there)
        weight_oi, lora_b_or = (local(each).to(there, non_blocking=True) for each in (weight_oi, self.lora_b_or))
        return merged(weight_oi, lora_a_ri, lora_b_or, scale, magnitude_o)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank. A collective."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def model_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, LayerAdapter | None]]:
    """The tensors that a model folder stores, by the names that they have in a module without adapters; each with the
    adapter of its layer, if there is one."""
    parts = {name: parameter for name, parameter in module.named_parameters() if is_adapter(name)}
    for name, tensor in stored_tensors(module):
        if is_adapter(name):
            continue
        layer, adapter = name.removesuffix(f"{BASE}weight"), None
        if layer != name:
            adapter = LayerAdapter(
                parts[tensor_name(layer, LORA_A)],
                parts[tensor_name(layer, LORA_B)],
                parts.get(tensor_name(layer, MAGNITUDE)),
            )
        yield name.replace(BASE, "."), tensor, adapter


def folder_shapes(module: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """For each tensor of `model_tensors` its name, and the tensors that the model folder stores for it: by stored name,
    on the meta device."""
    for name, tensor, _ in model_tensors(module):
        yield name, pieces(module, name, torch.empty(tensor.shape, device="meta"))


def choose_layers(module: PreTrainedModel, lora: Lora) -> list[str]:
    """Names of the layers that get an adapter, in the module's order. Raises InvalidJob for names that no linear layer
    has, and for a folder with adapters of others. The module may have no weights."""
    tied = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    heads = {name: part for name, part in module.named_modules() if part is module.get_output_embeddings()}
    modules = dict(module.named_modules())
    linear = [name for name, part in modules.items() if type(part) is nn.Linear and not is_router(name)]
    own = [name for name in linear if name in heads and id(heads[name].weight) not in tied]
    others = [*stored_layers(module), *heads]
    without_heads = [name for name in linear if name not in heads]
    recurrent, tower = recurrent_layers(modules), tower_layers(module)
    return AskedAdapter.of(lora).choose(without_heads, own, others, recurrent, tower)


def stored_layers(module: nn.Module, without: Collection[str] = ()) -> set[str]:
    """Names in the model folder of everything that has a weight there, except the module's layers `without`."""
    kept = (stored for name, stored in folder_shapes(module) if name.removesuffix(".weight") not in without)
    return {piece.removesuffix(".weight") for stored in kept for piece in stored}


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Computes without the adapters: with the model as it was before training."""
    adapted: list[Any] = [part for part in module.modules() if hasattr(part, "base_layer")]
    for layer in adapted:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)


class ModuleAdapter:
    """Implements `services.trainer.protocol.adapter.Adapter`."""

    def __init__(
        self,
        module: nn.Module,
        settings: AdapterSettings,
        config: Any,
        rank: int,
        parts: Mapping[Content, Published],
    ) -> None:
        self.settings = settings
        self.config = config
        self.parts = parts
        self._module = module
        self._rank = rank

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self._module.named_parameters():
            if is_adapter(name):
                whole = gathered(parameter)
                yield stored_name(name), whole.float().contiguous() if self._rank == 0 else None
