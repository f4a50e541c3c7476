"""The adapter that a job asks for: which layers have one, its parameters on each rank, and their first values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig
from torch import Tensor

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.adapters import WEIGHT, A, adapted_linears, adapter_layout, is_of_expert
from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.megatron.placement import Placement
from millrace.megatron.placement import Tensor as PlacedTensor
from millrace.megatron.rules import check_adapter
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, Layout, layout, tensors
from millrace.spec.lora import Lora
from services.trainer.backends.lora import configuration, first_a, settings_of, stored_values, target_names
from services.trainer.backends.megatron.adapters.layer import AdapterMode, AdapterShape, attach
from services.trainer.protocol.adapter import AdapterSettings, stored_name


@dataclass(frozen=True)
class AdapterPlan:
    """The adapter that a job asks for, of a model of one shape."""

    config: LoraConfig
    settings: AdapterSettings
    chosen: frozenset[str]
    """The layers of the model folder that have an adapter."""
    tensors: tuple[PlacedTensor, ...]
    """Its tensors, by their names in a module of PEFT that has the names of the model folder."""
    names: Names
    stored: Path | None
    """The PEFT folder whose adapter is trained further."""
    seed: int
    init: str
    """`model.lora.init`."""

    @classmethod
    def of(cls, lora: Lora, shape: ModelShape, layers: Layers, options: MegatronOptions, seed: int) -> Self:
        """Raises InvalidJob where there is no such layer, and for what Megatron's layers do not compute."""
        chosen, config = check_adapter(lora, options, shape, layers), configuration(lora)
        settings = settings_of(config)
        every = {tensor.name.removesuffix(WEIGHT) for tensor in tensors(shape, Topology(1, MegatronOptions()), layers)}
        of_experts = any(map(is_of_expert, chosen))
        config.target_modules = sorted(chosen) if of_experts else target_names(chosen, every - chosen)
        if shape.names.module != Names.module:  # other parts of the module have layers of the same last names
            config.target_modules = sorted(map(shape.names.in_module, chosen))
        alone = layout(shape, Topology(1, MegatronOptions()), 0, layers)
        (places,) = adapter_layout(adapted_linears(alone, chosen), settings.rank)
        found = (piece.tensor for placement in places.values() for piece in placement.pieces)
        stored = None if lora.adapter_path is None else Path(lora.adapter_path)
        return cls(config, settings, chosen, tuple(dict.fromkeys(found)), shape.names, stored, seed, lora.init)

    def stored_name(self, name: str) -> str:
        """Name in a PEFT folder of one of its tensors: PEFT has the names of the transformers module."""
        return stored_name(self.names.in_module(name))

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole adapter."""
        return sum(tensor.numel for tensor in self.tensors)

    def layout(self, base: Layout) -> Layout:
        """The places of the adapters' parameters on the rank whose other parameters are at `base`."""
        return adapter_layout(adapted_linears(base, self.chosen), self.settings.rank)

    def attach(self, chunks: Sequence[Any], base: Layout) -> AdapterMode:
        """Freezes the chunks of this rank and adds the adapters to them, with all values 0."""
        mode, config = AdapterMode(), chunks[0].config
        dropout, by_tokens = self.config.lora_dropout, config.sequence_parallel
        shape = AdapterShape(self.settings.rank, self.settings.scale, dropout, config.params_dtype, by_tokens)
        for chunk, linears in zip(chunks, adapted_linears(base, self.chosen), strict=True):
            attach(chunk, linears, shape, mode)
        return mode

    def first_values(self, places: Layout) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """For each chunk the parameters at `places` with their first values, float32, in host memory. Raises
        InvalidJob for a folder with another adapter."""
        stored: dict[str, Tensor] = {}
        if self.stored is not None:
            shapes = {self.stored_name(tensor.name): tensor.shape for tensor in self.tensors}
            stored = stored_values(self.stored, shapes)
        for chunk in places:
            yield ((name, self._first_value(placement, stored)) for name, placement in chunk.items())

    def _first_value(self, placement: Placement, stored: Mapping[str, Tensor]) -> Tensor:
        (piece,) = placement.pieces
        name = self.stored_name(piece.tensor.name)
        if stored:
            whole = stored[name]
        elif f".{A}." in name:
            whole = first_a(name, piece.tensor.shape, self.init, self.seed)
        else:
            return torch.zeros(placement.shape)
        box = tuple(slice(first, first + count) for first, count in zip(piece.source, piece.extent, strict=True))
        return whole[box]
