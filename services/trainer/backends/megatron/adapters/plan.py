"""The adapter of a job: which layers of the policy get one, what is published and saved of it, and the weights with
it added."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from peft import LoraConfig
from torch import Tensor, nn

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.adapters import WEIGHT, A, B, adapted_linears, adapter_layout, is_of_expert
from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.megatron.placement import Placement
from millrace.megatron.placement import Tensor as PlacedTensor
from millrace.megatron.rules import check_adapter
from millrace.megatron.topology import Topology
from millrace.megatron.weights import Layers, Layout, layout, tensors
from millrace.spec.lora import Lora
from millrace.weights.plans.manifest import Content
from services.trainer.backends.lora import configuration, first_a, settings_of, stored_values, target_names
from services.trainer.backends.megatron.adapters.layer import AdapterMode, AdapterShape, LayerAdapter, attach
from services.trainer.backends.megatron.published import GatherPlan, PublishedPart
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
        """Raises InvalidJob if there is no such layer, and for what Megatron's layers do not compute."""
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


if TYPE_CHECKING:  # importing PEFT takes seconds
    from services.trainer.backends.megatron.adapters.plan import AdapterPlan


class PolicyAdapter:
    """Implements `services.trainer.protocol.adapter.Adapter`."""

    def __init__(self, plan: "AdapterPlan", parts: Mapping[Content, PublishedPart], parameters: PublishedPart) -> None:
        """`parameters` are the adapter's as they are trained."""
        self.settings = plan.settings
        self.config = plan.config
        self.parts = parts
        self._parameters = parameters

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        for info, whole in self._parameters.export("float32"):
            yield info.name, whole


def in_folder(plan: "AdapterPlan", layout: Layout) -> Layout:
    """The places of an adapter's parameters under the names that its tensors have in a PEFT folder."""

    def stored(placed: Placement) -> Placement:
        return replace(
            placed, pieces=tuple(replace(piece, tensor=_stored(plan, piece.tensor)) for piece in placed.pieces)
        )

    return [{name: stored(placed) for name, placed in chunk.items()} for chunk in layout]


def gather_plan(plan: "AdapterPlan", layouts: Sequence[Layout]) -> GatherPlan:
    """Which rank gives which box of the adapter. `layouts` are the places on every rank, as in a PEFT folder."""
    return GatherPlan.of_layouts([_stored(plan, tensor) for tensor in plan.tensors], layouts)


def _stored(plan: "AdapterPlan", tensor: PlacedTensor) -> PlacedTensor:
    return replace(tensor, name=plan.stored_name(tensor.name))


class ScaledParameters:
    """The parameters of chunks, each matrix B times the adapter's scale: a copy of B, in the same memory every time."""

    def __init__(self, chunks: Sequence[nn.Module], scale: float) -> None:
        self._parameters = [dict(chunk.named_parameters()) for chunk in chunks]
        self._scale = scale
        self._scaled = [
            {name: torch.empty_like(parameter) for name, parameter in chunk.items() if name.endswith(f".{B}")}
            for chunk in self._parameters
        ]

    @torch.no_grad()
    def __call__(self) -> list[dict[str, Tensor]]:
        for parameters, copies in zip(self._parameters, self._scaled, strict=True):
            for name, copied in copies.items():
                torch.mul(parameters[name], self._scale, out=copied)
        return [{**parameters, **copies} for parameters, copies in zip(self._parameters, self._scaled, strict=True)]


def merged_weights(chunk: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The weights of a chunk that have an adapter, by name: each function computes one with its adapter added, float32,
    as far as this rank holds it."""
    parameters = dict(chunk.named_parameters())
    adapters = (part for part in chunk.modules() if isinstance(part, LayerAdapter))
    return {adapter.weight: partial(_merged, parameters[adapter.weight], adapter) for adapter in adapters}


@torch.no_grad()
def _merged(weight_oi: Tensor, adapter: LayerAdapter) -> Tensor:
    added_oi: Tensor = adapter.matrix_b().float() @ adapter.matrix_a().float()
    return weight_oi.float() + added_oi
