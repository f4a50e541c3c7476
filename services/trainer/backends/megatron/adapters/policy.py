"""The adapter of a loaded policy: its export, and the weights with it added."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from millrace.megatron.adapters import ADAPTERS, WEIGHT
from millrace.megatron.weights import Layout
from services.trainer.backends.megatron.weights.export import GatherPlan
from services.trainer.protocol.adapter import stored_name

if TYPE_CHECKING:  # importing PEFT takes seconds
    from services.trainer.backends.megatron.adapters.plan import AdapterPlan


class PolicyAdapter:
    """Implements `services.trainer.protocol.adapter.Adapter`."""

    def __init__(self, plan: "AdapterPlan", chunks: Sequence[nn.Module], layouts: Sequence[Layout]) -> None:
        """`layouts` are the places of the adapters' parameters on every rank."""
        self.settings = plan.settings
        self.config = plan.config
        self._chunks = chunks
        self._gather_plan = GatherPlan.of_layouts(plan.tensors, layouts)

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        chunks = [dict(chunk.named_parameters()) for chunk in self._chunks]
        device = next(self._chunks[0].parameters()).device
        for info, whole in self._gather_plan.export(chunks, "float32", device):
            yield stored_name(info.name), whole

    def merged(self) -> list["MergedParameters"]:
        """The parameters and buffers of each chunk, with the adapters added."""
        return [MergedParameters(chunk) for chunk in self._chunks]


class MergedParameters(Mapping[str, Tensor]):
    """The parameters and buffers of a chunk by name, each weight with its adapter added to it. The one that was last
    asked for is kept, since all tensors of a fused weight are asked for one after the other."""

    def __init__(self, chunk: nn.Module) -> None:
        self._tensors = {**dict(chunk.named_buffers()), **dict(chunk.named_parameters())}
        ending = f".{ADAPTERS}"
        self._adapters: dict[str, Any] = {
            name.removesuffix(ending) + WEIGHT: part for name, part in chunk.named_modules() if name.endswith(ending)
        }
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
