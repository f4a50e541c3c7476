"""The adapter of a loaded policy: what is published and saved of it, and the weights with it added."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from millrace.megatron.adapters import B
from millrace.megatron.placement import Tensor as PlacedTensor
from millrace.megatron.weights import Layout
from millrace.weights.plans.manifest import Content
from services.trainer.backends.megatron.adapters.layer import LayerAdapter
from services.trainer.backends.megatron.weights.export import GatherPlan
from services.trainer.backends.megatron.weights.part import PublishedPart
from services.trainer.protocol.adapter import stored_name

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


def in_folder(layout: Layout) -> Layout:
    """The places of an adapter's parameters under the names that its tensors have in a PEFT folder."""
    return [
        {
            name: replace(placed, pieces=tuple(replace(piece, tensor=_stored(piece.tensor)) for piece in placed.pieces))
            for name, placed in chunk.items()
        }
        for chunk in layout
    ]


def gather_plan(plan: "AdapterPlan", layouts: Sequence[Layout]) -> GatherPlan:
    """Which rank gives which box of the adapter. `layouts` are the places on every rank, as in a PEFT folder."""
    return GatherPlan.of_layouts([_stored(tensor) for tensor in plan.tensors], layouts)


def _stored(tensor: PlacedTensor) -> PlacedTensor:
    return replace(tensor, name=stored_name(tensor.name))


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


class MergedParameters(Mapping[str, Tensor]):
    """The parameters and buffers of a chunk by name, each weight with its adapter added to it. The one that was last
    asked for is kept, since all tensors of a fused weight are asked for one after the other."""

    def __init__(self, chunk: nn.Module) -> None:
        self._tensors = {**dict(chunk.named_buffers()), **dict(chunk.named_parameters())}
        self._adapters = {part.weight: part for part in chunk.modules() if isinstance(part, LayerAdapter)}
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapters:
            return self._tensors[name]
        if self._last[0] != name:
            adapter = self._adapters[name]
            added = adapter.matrix_b().float() @ adapter.matrix_a().float()
            self._last = (name, self._tensors[name].float() + added)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
