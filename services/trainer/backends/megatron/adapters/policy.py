"""The adapter of a loaded policy: what is published and saved of it, and the weights with it added."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from millrace.megatron.adapters import B
from millrace.megatron.placement import Placement
from millrace.megatron.placement import Tensor as PlacedTensor
from millrace.megatron.weights import Layout
from millrace.weights.plans.manifest import Content
from services.trainer.backends.megatron.adapters.layer import LayerAdapter
from services.trainer.backends.megatron.weights.export import GatherPlan
from services.trainer.backends.megatron.weights.part import PublishedPart

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
